"""Accept artifacts as they are after a change that does not matter to them, so that they are not made again.

    .venv/bin/python scripts/accept.py --why "renamed a variable" results/hidden_states/0000/0000.safetensors

The artifact keeps its id, and what was made from it stays up to date; its record says who accepted it, when, and why.
Options after -- go to Snakemake (the --configfile of the run, say).
"""

import argparse
import getpass
import json
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.plan import STALE


def accept(paths: list[str], why: str, snakemake: list[str]) -> None:
    """Stamp each path with the id that it would get now. Raises DraftlineError for one that is not stale."""
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(Path(__file__).resolve().parent.parent / "Snakefile"),
    ]
    planned = subprocess.run([*command, "-n", "-q", "all", *snakemake], capture_output=True, text=True, check=False)
    if planned.returncode:
        raise DraftlineError(f"snakemake -n: failed; mend that first\n{planned.stderr.strip().splitlines()[-1]}")
    stale = json.loads(STALE.read_text(encoding="utf-8"))
    for path in paths:
        if path not in stale:
            raise DraftlineError(f"{path}: is not stale by its own settings or inputs; there is nothing to accept")
    for path in paths:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        accepted = {**stale[path], "who": who, "when": when, "why": why}
        provenance.restamp(path, {**provenance.read(path), "accepted": accepted})
        print(f"accepted {path}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--why", required=True, help="reason, kept in the artifact")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    own, snakemake = (sys.argv[1:], [])
    if "--" in own:
        own, snakemake = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    try:
        accept(options.paths, options.why, snakemake)
    except DraftlineError as error:
        sys.exit(f"accept: {error}")


if __name__ == "__main__":
    main()
