"""Preflight: a look at a node before the first GPU job there, because a bad node may be merely slow.

The real packages are imported, each GPU multiplies matrices, several sum numbers together, results/ and the scratch folder
are written and read. The figures are kept in ``results/.resume/preflight/`` by node, driver and kind of GPU; while they
hold for the same devices, packages and mounts, a job starts at once. A node that fails is named, refused, and listed in `BAD`.
"""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from draftline.errors import DraftlineError
from draftline.preflight.limits import Check, checks
from draftline.preflight.measure import Figures, Load, measure
from draftline.preflight.scene import Scene, describe, visible_devices
from draftline.progress import say
from draftline.provenance import replacing
from draftline.slurm import BAD_NODES

ROOT = Path("results/.resume/preflight")
BAD = BAD_NODES
"""A file ``{node}.json`` for each node that failed, by its name in SLURM, which is asked to leave these out."""
AGAIN = "scripts/preflight.py --again"
PATIENCE = 10
"""Time limits that a job waits for another one's preflight; each step of it has one."""


@dataclass(frozen=True)
class Report:
    """Outcome of a look at a scene: its figures and their checks."""

    scene: Scene
    figures: Figures
    checks: list[Check] = field(default_factory=list)

    @property
    def problems(self) -> list[Check]:
        return [check for check in self.checks if check.problem]


def ensure(limits: Mapping[str, float], manifest: str | None = None) -> None:
    """Raise DraftlineError when this node does not pass with the visible devices (the job's own), or did not before.

    `limits` is the config's `run.preflight`, `manifest` the target's.
    """
    scene = describe(*visible_devices(), manifest)
    refuse(scene)
    report = look(scene, limits)
    if report.problems:
        raise DraftlineError("\n".join(verdict(report)))


def refuse(scene: Scene) -> None:
    """Raise DraftlineError when the node, or a device or group of the scene, failed before."""
    for problem in bad_record(scene.node)["problems"]:
        if scene.uuids.issuperset(problem["devices"]):
            raise DraftlineError(
                f"node {scene.node}: failed its preflight on {problem['when']}: {problem['text']}\n"
                f"It is left out ({bad_path(scene.node)}); once it is mended, run there: {AGAIN}"
            )


def look(scene: Scene, limits: Mapping[str, float], again: bool = False, load: Load = Load()) -> Report:  # noqa: B008
    """Figures and checks of a scene: recorded where they hold and are good, else measured, by one process a node at a time.

    `again` measures everything, and takes back what stands against the node and these devices if all is well.
    """
    report = _recorded(scene, limits)
    if not again and len(report.figures) == len(scene.parts):
        return report
    ROOT.mkdir(parents=True, exist_ok=True)
    with _alone(scene.node, limits["timeout_s"]):
        known = {} if again else _recorded(scene, limits).figures
        missing = [part for part in scene.parts if part not in known]
        if missing:
            say(f"preflight of node {scene.node}: {len(scene.devices)} x {scene.devices[0].name}")
        figures = known | _stamped(measure(scene, missing, limits["timeout_s"], load))
        report = Report(scene, figures, checks(scene, figures, limits, _rates(figures)))
        if missing:
            _write_record(report, limits)
        if report.problems:
            _mark(report)
        elif again:
            _unmark(scene)
    return report


def verdict(report: Report) -> tuple[str, str]:
    """Two lines on a report with problems: the first of them, and what follows."""
    node, problems = report.scene.node, report.problems
    more = f" (and {len(problems) - 1} more: {_record_path(report.scene)})" if len(problems) > 1 else ""
    first = f"node {node}: failed its preflight: {problems[0].part}: {problems[0].problem}{more}"
    if _counting(report):
        return first, f"It is left out from now on ({bad_path(node)}); once it is mended, run there: {AGAIN}"
    return first, "Not held against the node, because no other node has passed with these packages."


# Records --------------------------------------------------------------------------------------------------------------


def _recorded(scene: Scene, limits: Mapping[str, float]) -> Report:
    """The recorded figures that hold for this scene and are within today's limits."""
    entries = _read(_record_path(scene)).get("figures", {})
    held = {part: entries[part] for part in scene.parts if part in entries and _holds(entries[part], scene)}
    rates = _rates(held)
    good = {
        part: entry
        for part, entry in held.items()
        if not any(c.problem for c in checks(scene, {part: entry}, limits, rates))
    }
    return Report(scene, good, checks(scene, good, limits, rates))


def _holds(entry: Mapping[str, Any], scene: Scene) -> bool:
    """Whether figures were taken with the scene's packages; a disk's do not depend on them."""
    return "versions" not in entry or scene.versions.items() <= entry["versions"].items()


def _rates(figures: Figures) -> dict[str, dict[str, float]]:
    """TFLOP/s by kind and UUID, of all records and of these figures."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    recorded = [_read(path).get("figures", {}) for path in sorted(ROOT.glob("*.json"))]
    for entries in [*recorded, figures]:
        for part, entry in entries.items():
            if "tflops" in entry:
                rates[entry["kind"]][part] = entry["tflops"]
    return rates


def _stamped(figures: Figures) -> Figures:
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {part: {"when": when, **entry} for part, entry in figures.items()}


def _write_record(report: Report, limits: Mapping[str, float]) -> None:
    path = _record_path(report.scene)
    record = {
        "node": report.scene.node,
        "driver": report.scene.driver,
        "limits": dict(limits),
        "verdict": "failed" if report.problems else "passed",
        "problems": [f"{check.part}: {check.problem}" for check in report.problems],
        "figures": _read(path).get("figures", {}) | report.figures,
    }
    _write(path, record)


def _record_path(scene: Scene) -> Path:
    return ROOT / f"{scene.name}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DraftlineError(f"{path}: not a preflight record ({error}); delete it and run again") from None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


@contextlib.contextmanager
def _alone(node: str, timeout: float) -> Iterator[None]:
    """Hold the node's lock. It goes with the process, however that ends."""
    lock = filelock.FileLock(ROOT / f"{node}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"waiting for the preflight of node {node} by another job")
            lock.acquire(timeout=PATIENCE * timeout)
    except filelock.Timeout:
        raise DraftlineError(
            f"{lock.lock_file}: held for {PATIENCE * timeout:g} s; a preflight hangs; end its process and run again"
        ) from None
    except NotImplementedError:
        raise DraftlineError(
            f"{lock.lock_file}: no file locks on this file system; mount it with them (Lustre: -o flock)"
        ) from None
    try:
        yield
    finally:
        lock.release()


# Bad nodes ------------------------------------------------------------------------------------------------------------


def bad_path(node: str) -> Path:
    """Where it stands that a node is bad."""
    return BAD / f"{node}.json"


def bad_record(node: str) -> dict[str, Any]:
    """What stands against a node: ``problems``, each with ``text``, ``when`` and its ``devices`` (none: all of the node)."""
    return {"node": node, "problems": [], **_read(bad_path(node))}


def _counting(report: Report) -> list[Check]:
    """The problems that make the node a bad one: packages only if another node has passed with them."""
    proven = any(
        _holds(entry, report.scene) and "tflops" in entry
        for path in ROOT.glob("*.json")
        if (record := _read(path)).get("node") != report.scene.node
        for entry in record.get("figures", {}).values()
    )
    return [check for check in report.problems if proven or not check.environment]


def _mark(report: Report) -> None:
    node, when = report.scene.node, time.strftime("%Y-%m-%dT%H:%M:%S%z")
    found = [
        {"when": when, "text": f"{check.part}: {check.problem}", "devices": list(check.devices)}
        for check in _counting(report)
    ]
    if found:
        older = [old for old in bad_record(node)["problems"] if not report.scene.uuids.issuperset(old["devices"])]
        _write_bad(node, found + older)


def _unmark(scene: Scene) -> None:
    left = [old for old in bad_record(scene.node)["problems"] if not scene.uuids.issuperset(old["devices"])]
    if left:
        _write_bad(scene.node, left)
    else:
        bad_path(scene.node).unlink(missing_ok=True)


def _write_bad(node: str, problems: list[dict[str, Any]]) -> None:
    _write(
        bad_path(node),
        {"node": node, "when": problems[0]["when"], "reason": problems[0]["text"], "problems": problems},
    )
