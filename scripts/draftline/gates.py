"""Gates: checks that stop the run before work is spent on what is wrong.

A gate that passes is the artifact ``{name}.json``. One that fails leaves ``{name}.failed.json`` beside that place, and goes
when the gate passes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftline import provenance
from draftline.errors import DraftlineError


def close_gate(
    path: str | Path,
    record: provenance.Record,
    *,
    figures: Mapping[str, Any],
    limits: Mapping[str, Any],
    failures: Sequence[str],
    waived: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write a gate's result. `failures` are one-line messages, the worst first; none means passed.

    Raises DraftlineError with the worst failure and where to read the others.
    """
    path = Path(path)
    failed = path.with_suffix(".failed.json")
    result = {"passed": not failures, "figures": figures, "limits": limits, "waived": list(waived)}
    if not failures:
        provenance.write_json(path, result, record)
        failed.unlink(missing_ok=True)
        return
    provenance.write_json(failed, {**result, "failures": list(failures)}, record)
    path.unlink(missing_ok=True)
    more = f"and {len(failures) - 1} more; " if len(failures) > 1 else ""
    raise DraftlineError(f"{failures[0]}\n{more}see {failed}")
