"""results/report.html: everything that a run made, on one page without any outside resource."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import orjson
import yaml
from markupsafe import Markup, escape

from draftline import provenance
from draftline.chat import Chat
from draftline.manifest import Manifest
from draftline.report import charts, data, runs, training
from draftline.report.accepted import BASELINES, Accepted, Evaluation

COLOURS = 6
SAMPLES_PER_SOURCE, HEAD, TAIL = 2, 100, 60
MANY_SOURCES = 12
LONGEST_JOBS = 100
NARROW = 320
"""Width of a chart in a row of three."""

Record = provenance.Record


@dataclass(frozen=True)
class Inputs:
    """Paths of the artifacts that the page is drawn from, each list in the order of the config."""

    manifest: str
    tokenizer: str
    prompts: list[str]
    completions: list[str]
    tokens: list[str]
    mask: str
    gates: list[str]
    metrics: list[str]
    evaluations: list[str]

    def all(self) -> list[str]:
        return [
            path for value in asdict(self).values() for path in ([value] if isinstance(value, str) else value)
        ]  # fmt: skip


def make_report(inputs: Inputs, config: dict[str, Any], record: Record, output: str) -> None:
    """Draw the page. `config` is shown as it is; `record` goes into the page."""
    html = render(inputs, config, record)
    with provenance.replacing(output) as temporary:
        temporary.write_text(html, encoding="utf-8")


def render(inputs: Inputs, config: dict[str, Any], record: Record) -> str:
    """The page's text. Reads small files and headers only, beside one shard of tokens and the mask's statistics."""
    manifest, chat = Manifest.load(inputs.manifest), Chat.load(inputs.manifest, inputs.tokenizer)
    accepted, trained = Accepted.read(inputs.evaluations), training.trainings(inputs.metrics)
    sources = data.source_counts(inputs.prompts[0], inputs.completions, inputs.tokens)
    per_source = 1 if len(sources) > MANY_SOURCES else SAMPLES_PER_SOURCE
    gates, stages = runs.gates(inputs.gates), runs.stages(inputs.all())
    series = {name: f"s{n % COLOURS}" for n, name in enumerate(accepted.trained)} | {name: name for name in BASELINES}
    return _template().render(
        style=Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8")),
        record=_script(record),
        manifest=manifest,
        accepted=accepted,
        series=series,
        benches=[_bench(accepted, bench, series) for bench in accepted.benches],
        courses=_courses(accepted, trained, series),
        positions=[(bench, _positions(accepted, bench, series)) for bench in accepted.benches],
        trained=trained,
        curves=_curves(trained, series),
        sources=sources,
        total=lambda stage, name: sum(getattr(source, stage).get(name, 0) for source in sources),
        statuses=_columns([source.completions for source in sources]),
        reasons=_columns([source.prompts for source in sources], without=("read", "kept")),
        retokenized=data.retokenized(inputs.completions),
        masks=_masks(data.masks(inputs.mask)),
        samples=data.samples(inputs.tokens[0], manifest, chat, per_source, HEAD, TAIL),
        gates=[gate for gate in gates if not gate.name.startswith("mask/")],
        shard_gates=[gate for gate in gates if gate.name.startswith("mask/")],
        stages=[(stage, _stage_bar(stage, stages)) for stage in stages],
        jobs=sorted((job for stage in stages for job in stage.jobs), key=lambda job: -job.seconds)[:LONGEST_JOBS],
        job_count=sum(len(stage.jobs) for stage in stages),
        seconds=sum(stage.seconds for stage in stages),
        settings=yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        accepted_by_hand=runs.accepted(inputs.all()),
        origin=_origin(manifest, inputs, accepted),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "size": size,
        "visible": visible,
        "text": runs.text,
        "flat": runs.flat,
    }
    return environment.get_template("page.html.j2")


def _script(record: Record) -> Markup:
    """The record as the page's script element, as `provenance.read` finds it."""
    text = orjson.dumps(record).decode().replace("<", "\\u003c")
    return Markup(f"{provenance.HTML_OPEN}{text}</script>")


# Accepted lengths -----------------------------------------------------------------------------------------------------


def _bench(accepted: Accepted, bench: str, series: dict[str, str]) -> dict[str, Any]:
    """A set's table and chart."""
    evaluations, ways = accepted.of(bench), accepted.ways(bench)
    groups = [
        (
            way,
            [
                charts.Interval(series[e.drafter], e.drafter, e.tau[way].value, e.tau[way].low, e.tau[way].high)
                for e in evaluations
                if way in e.tau
            ],
        )
        for way in ways
    ]
    chart = charts.intervals(f"Accepted length on {bench} with 95% intervals", groups)
    above = {(e.drafter, way): accepted.above_baselines(e, way) for e in evaluations for way in e.tau}
    return {"name": bench, "ways": ways, "evaluations": evaluations, "chart": chart, "above": above}


def _courses(accepted: Accepted, trained: list[training.Training], series: dict[str, str]) -> list[tuple[str, Markup]]:
    """Chain and widest tree by training step, for drafters with checkpoints; a chart a set and way."""
    found = []
    for bench in accepted.benches:
        ways = accepted.ways(bench)
        for way in dict.fromkeys([ways[0], ways[-1]]):
            entries = []
            for drafter in trained:
                course = accepted.course(drafter.drafter, bench, last=max(drafter.ends, default=0))
                points = [(drafter.ends[n], e.tau[way]) for n, e in course if n in drafter.ends and way in e.tau]
                if drafter is trained[0]:  # Whose shape and seed the untrained baseline has.
                    points = [(0, e.tau[way]) for e in accepted.of(bench) if e.drafter == "untrained"] + points
                if len(course) > 1:
                    entries.append(
                        charts.Line(
                            series[drafter.drafter],
                            drafter.drafter,
                            [float(step) for step, _ in points],
                            [tau.value for _, tau in points],
                            [tau.low for _, tau in points],
                            [tau.high for _, tau in points],
                            marks=True,
                        )
                    )
            if entries:
                chart = charts.lines(f"Accepted length of {way} on {bench} by training step", entries, "training step")
                found.append((f"{bench}, {way}", chart))
    return found


def _positions(accepted: Accepted, bench: str, series: dict[str, str]) -> Markup:
    entries = [
        charts.Line(
            series[e.drafter], e.drafter, [float(k + 1) for k in range(len(e.per_position))], e.per_position, marks=True
        )
        for e in accepted.of(bench)
    ]
    slots = max((len(entry.x) for entry in entries), default=0)
    return charts.lines(
        f"Share of rounds that accept each slot on {bench}",
        entries,
        "slot",
        y_low=0.0,
        y_high=_ceiling(max((y for entry in entries for y in entry.y), default=1.0)),
        x_ticks=[float(k) for k in range(1, slots + 1)],
        percent=True,
    )


def _ceiling(share: float) -> float:
    """The end of an axis of shares: the next tenth."""
    return min(1.0, -(-share * 10 // 1) / 10) or 0.1


def _curves(trained: list[training.Training], series: dict[str, str]) -> list[tuple[str, Markup]]:
    found = []
    for measure, title in training.MEASURES.items():
        entries = [_curve(run, measure, series) for run in trained]
        ends = sorted({float(end) for run in trained for end in list(run.ends.values())[:-1]})
        floor = {"loss": None, "accuracy": 0.0, "tau": 1.0}[measure]
        chart = charts.lines(
            f"{title} by training step",
            entries,
            "training step",
            floor,
            x_marks=ends,
            percent=measure == "accuracy",
            width=NARROW,
        )
        found.append((title, chart))
    return found


def _curve(run: training.Training, measure: str, series: dict[str, str]) -> charts.Line:
    curve = run.curves[measure]
    lists = (part.tolist() for part in (curve.steps, curve.mean, curve.low, curve.high))
    return charts.Line(series.get(run.drafter, "s0"), run.drafter, *lists)


# Data and runs --------------------------------------------------------------------------------------------------------


def _columns(counts: Sequence[dict[str, int]], without: Sequence[str] = ()) -> list[str]:
    """Names that occur in any of `counts`, more frequent ones first."""
    totals: dict[str, int] = {}
    for row in counts:
        for name, count in row.items():
            totals[name] = totals.get(name, 0) + count
    return sorted((name for name, total in totals.items() if total and name not in without), key=lambda n: -totals[n])


def _masks(masks: data.Masks) -> dict[str, Any]:
    edges = masks.edges.tolist()
    rows = []
    for source in masks.sources:
        stacks = [
            ("finished", "stopped by themselves", source.finished.tolist()),
            ("cut", "were cut", source.cut.tolist()),
        ]
        rows.append((source, charts.histogram(f"Supervised tokens per sample of {source.name}", edges, stacks)))
    return {"rows": rows, "axis": charts.histogram_axis(edges), "all": masks}


def _stage_bar(stage: runs.Stage, stages: list[runs.Stage]) -> Markup:
    longest = max(other.seconds for other in stages) or 1.0
    return charts.bar(
        f"{stage.rule}: {duration(stage.seconds)} in {len(stage.jobs)} jobs",
        [job.seconds / longest for job in stage.jobs],
    )


def _origin(manifest: Manifest, inputs: Inputs, accepted: Accepted) -> dict[str, dict[str, Any]]:
    """What the artifacts say of their making, by topic."""
    target = {key: value for key, value in manifest.to_json().items() if key not in ("chat_template", "layer_types")}
    names = ("eos_token_ids", "pad_token_id", "mask_token_id", "think_open", "think_close")
    target |= {key: str(target[key]) for key in names if target[key] is not None}  # Names, not amounts.
    kinds = {kind: manifest.layer_types.count(kind) for kind in dict.fromkeys(manifest.layer_types)}
    target["layers by type"] = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return {
        "Target": target,
        "Completions": {
            name: provenance.parquet_facts(inputs.completions[0], name)
            for name in ("engine", "engine_version", "sampling")
        },
        "Hidden states": _states_facts(inputs.metrics),
        "Evaluation": _harness(accepted.evaluations),
    }


def _states_facts(metrics: Sequence[str]) -> dict[str, Any]:
    """Facts of the first part of hidden states that is still there, but for its statistics, which a gate shows."""
    for path in (path for file in metrics for path in provenance.read(file)["inputs"]):
        if "hidden_states/" in path and Path(path).exists():
            provenance.read(path)
            facts = provenance.safetensors_header(path)["__metadata__"]
            return {key: facts[key] for key in sorted(facts) if key not in (provenance.KEY, "statistics")}
    return {}


def _harness(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Facts that all evaluations share."""
    first = dict(runs.flat(evaluations[0].harness)) if evaluations else {}
    others = [dict(runs.flat(evaluation.harness)) for evaluation in evaluations[1:]]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


# Texts ----------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def visible(text: str) -> Markup:
    """A token's text with line ends and tabs shown. The signs are not part of what is copied."""
    shown = escape(text).replace("\n", Markup("<u>↵</u>\n")).replace("\t", Markup("<u>→</u>\t"))
    return Markup(shown)
