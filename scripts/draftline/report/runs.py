"""Gates, and what ran where and how long.

Run records stand beside the logs, because an artifact holds no time and no host. Which of them belong to the artifacts at hand
is told by the artifacts' ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from draftline import provenance
from draftline.errors import DraftlineError


@dataclass(frozen=True)
class Gate:
    """A gate that passed. `tables` are its figures as tables, title -> rows of cells, the first row being the head."""

    name: str
    tables: dict[str, list[list[Any]]]
    limits: dict[str, Any]
    waived: list[dict[str, Any]]


def gates(paths: Iterable[str]) -> list[Gate]:
    """Gates by their files, in order."""
    found = []
    for path in paths:
        provenance.read(path)
        values = orjson.loads(Path(path).read_bytes())
        name = "/".join(Path(path).with_suffix("").parts[2:])
        found.append(Gate(name, tables(values["figures"]), values["limits"], values["waived"]))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested figures as dotted names and texts."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", text(value)))
    return found


def tables(figures: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Figures as tables: an entry whose values are alike (one a source, say) has a row for each; the rest is one table."""
    found: dict[str, list[list[Any]]] = {}
    rest: dict[str, Any] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping) and len(value) and all(isinstance(entry, Mapping) for entry in value.values()):
            rows = {name: dict(flat(entry)) for name, entry in value.items()}
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            found[key] = [["", *columns], *([name, *(row.get(c, "") for c in columns)] for name, row in rows.items())]
        else:
            rest[key] = value
    if rest:
        found[""] = [["figure", "value"], *map(list, flat(rest))]
    return found


def text(value: Any) -> str:
    """A figure for people: four digits are enough of a fraction."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return str(value)


def accepted(paths: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Artifacts that somebody accepted as they are after a change (scripts/accept.py): path, and who, when and why."""
    records = ((path, provenance.read(path)) for path in paths)
    return [(path, record["accepted"]) for path, record in records if "accepted" in record]


@dataclass(frozen=True)
class JobRun:
    """One finished job: its rule, its log's name (the wildcards), place and cost."""

    rule: str
    name: str
    host: str
    device: str
    gpus: int
    threads: int
    started: float
    seconds: float
    memory: int


@dataclass(frozen=True)
class Stage:
    """All jobs of a rule."""

    rule: str
    jobs: list[JobRun]

    @property
    def seconds(self) -> float:
        return sum(job.seconds for job in self.jobs)

    @property
    def memory(self) -> int:
        return max(job.memory for job in self.jobs)

    def places(self, of: str) -> str:
        """Hosts or devices, each once."""
        return ", ".join(sorted({str(getattr(job, of)) for job in self.jobs}))


def stages(artifacts: Iterable[str], logs: Path = Path("results/logs")) -> list[Stage]:
    """Jobs that made `artifacts` and everything that these were made from, by rule, in the order in which they began."""
    ids = _ancestry(artifacts)
    jobs: dict[str, list[JobRun]] = {}
    for path in sorted(logs.glob("*/*.run.json")):
        try:
            facts = orjson.loads(path.read_bytes())
        except ValueError:
            continue  # A job was killed while it wrote this note; its artifact is not affected.
        if facts["id"] not in ids:
            continue
        jobs.setdefault(path.parent.name, []).append(
            JobRun(
                rule=path.parent.name,
                name=path.name.removesuffix(".run.json"),
                host=facts["host"],
                device=facts["device"],
                gpus=facts["gpus"],
                threads=facts["threads"],
                started=facts["started"],
                seconds=facts["seconds"],
                memory=facts["peak_memory_bytes"],
            )
        )
    found = [Stage(rule, sorted(of_rule, key=lambda job: job.started)) for rule, of_rule in jobs.items()]
    return sorted(found, key=lambda stage: stage.jobs[0].started)


def _ancestry(artifacts: Iterable[str]) -> set[str]:
    """Ids of artifacts and of all that they were made from, as far as the files are still there."""
    ids: set[str] = set()
    seen: set[str] = set()
    queue = list(artifacts)
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            record = provenance.read(path)
        except DraftlineError:
            continue  # Temporary artifacts are gone by now.
        ids.add(record["id"])
        ids.update(record["inputs"].values())
        queue.extend(record["inputs"])
    return ids
