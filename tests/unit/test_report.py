"""The report tells what the artifacts say, copes with small and large runs, and needs nothing from outside."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import report_artifacts as made
from draftline import provenance
from draftline.chat import Chat
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.report import charts, data, page, runs, training
from draftline.report.accepted import Accepted, Tau

LARGE = made.Run(
    drafters=("full", "sliding"),
    benches=("humaneval", "gsm8k", "mt_bench"),
    sources=tuple(f"source_{n:02d}" for n in range(14)),
    budgets=(8, 64),
    shards=8,
    segments=3,
    steps=2000,
    scale=7000,
    limit=4096,
    block=16,
)
SMALL = made.Run(
    benches=("fresh",),
    sources=("only",),
    budgets=(8,),
    shards=1,
    segments=1,
    steps=3,
    checkpoints=False,
    thinking=False,
)


class Page(HTMLParser):
    """Elements, ids and visible text of a page; unclosed elements are an error."""

    VOID = ("meta", "link", "br", "line", "circle", "rect", "path", "polyline", "polygon")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, words):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(words)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A made-up run in its folder, and its page."""

    folder: Path
    inputs: page.Inputs
    config: dict[str, Any]
    text: str


def draw(folder: Path, run: made.Run) -> Drawn:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        inputs, config = made.make_run(run)
        record = made.record("report", "results/report.html", inputs.all())
        page.make_report(inputs, config, record, "results/report.html")
    return Drawn(folder, inputs, config, (folder / "results" / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drawn]:
    runs = {"demo": made.Run(), "large": LARGE, "small": SMALL}
    return {name: draw(tmp_path_factory.mktemp(name), run) for name, run in runs.items()}


@pytest.fixture
def demo(every: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The default run; the test works in its folder and changes nothing there."""
    monkeypatch.chdir(every["demo"].folder)
    return every["demo"]


@pytest.fixture
def large(every: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch) -> Drawn:
    monkeypatch.chdir(every["large"].folder)
    return every["large"]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """A small run of the test's own."""
    monkeypatch.chdir(tmp_path)
    return draw(tmp_path, SMALL)


@pytest.mark.parametrize("run", ["demo", "large", "small"])
def test_page_is_whole_and_asks_for_nothing_from_outside(every: dict[str, Drawn], run: str) -> None:
    text = every[run].text
    parsed = Page(text)
    assert parsed.open == []
    assert text.rstrip().endswith("</html>")
    links = [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "url(" not in text
    assert "@import" not in text
    targets = {attributes["id"] for _, attributes in parsed.elements if "id" in attributes}
    assert {link[1:] for link in links if link.startswith("#")} <= targets
    assert len(text) < 1_000_000


@pytest.mark.parametrize("run", ["demo", "large", "small"])
def test_every_chart_is_well_formed_and_reads_out(every: dict[str, Drawn], run: str) -> None:
    text = every[run].text
    figures = re.findall(r"<svg [^>]*role=\"img\".*?</svg>", text, re.DOTALL)
    assert len(figures) >= 6
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.get("aria-label")
        assert "nan" not in figure
        assert "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", figure)


def test_record_is_read_back(demo: Drawn) -> None:
    inputs = demo.inputs
    record = provenance.read("results/report.html")
    assert record == made.record("report", "results/report.html", inputs.all())


def test_a_cut_page_is_refused_by_path(fresh: Drawn) -> None:
    text = fresh.text
    Path("results/report.html").write_text(text[: len(text) // 2])
    with pytest.raises(DraftlineError, match=r"results/report\.html: damaged"):
        provenance.read("results/report.html")


def test_names_from_outside_cannot_become_markup(fresh: Drawn) -> None:
    inputs, config = fresh.inputs, fresh.config
    evil = "</pre></script><script>alert(1)</script>"
    manifest = dataclasses.replace(Manifest.load(inputs.manifest), name=evil)
    manifest.write(inputs.manifest, made.record("target", inputs.manifest))
    config["note"] = evil
    record = {**made.record("report", "results/report.html"), "inputs": {evil: "0"}}
    page.make_report(inputs, config, record, "results/report.html")
    text = Path("results/report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert Page(text).open == []
    assert provenance.read("results/report.html")["inputs"] == {evil: "0"}


def test_headline_table_has_each_tau_with_its_interval(demo: Drawn) -> None:
    text = demo.text
    inputs = demo.inputs
    for path in inputs.evaluations:
        values = json.loads(Path(path).read_text())
        if "checkpoints" in path:
            continue
        for way in (values["chain"], *values["ddtree"].values()):
            low, high = way["ci95"]
            assert f"<b>{way['tau']:.2f}</b><small>{low:.2f}–{high:.2f}</small>" in text


def test_counts_are_added_up_over_shards(demo: Drawn) -> None:
    inputs = demo.inputs
    counts = data.source_counts(inputs.prompts[0], inputs.completions, inputs.tokens)
    assert [source.name for source in counts] == ["python_functions", "explanation", "chat"]
    assert counts[0].prompts == {"read": 140, "kept": 120, "duplicate": 14, "overlap": 6}
    assert counts[0].completions == {"ok": 88, "truncated": 28, "repetition": 4}


def test_waivers_are_shown_with_source_reason_and_failure(demo: Drawn) -> None:
    text = demo.text
    words = Page(text).text
    assert made.WAIVER["reason"] in words
    assert made.WAIVER["failure"] in words


def test_an_artifact_accepted_by_hand_is_named_with_its_reason(fresh: Drawn) -> None:
    mask = fresh.inputs.mask
    accepted = {"id": "0", "who": "ann@box1", "when": "2026-01-02T03:04:05+00:00", "why": "renamed a variable"}
    provenance.write_parquet(mask, provenance.read_parquet(mask), {**provenance.read(mask), "accepted": accepted})
    text = page.render(fresh.inputs, fresh.config, made.record("report", "results/report.html"))
    assert f"{mask} was made before a change, and accepted as it is by ann@box1 on 2026-01-02" in Page(text).text


def test_an_evaluation_on_states_of_other_kernels_is_named(fresh: Drawn) -> None:
    path = next(p for p in fresh.inputs.evaluations if "untrained" not in p and "unigram" not in p)
    values = json.loads(Path(path).read_text())
    values["harness"]["kernel_mismatch"] = (
        "kernels {'linear_attention': 'fla'}, in training {'linear_attention': 'torch'}"
    )
    Path(path).write_text(json.dumps(values))
    assert "kernel_mismatch" not in fresh.text
    assert "were not computed like those" not in Page(fresh.text).text
    words = Page(page.render(fresh.inputs, fresh.config, made.record("report", "results/report.html"))).text
    assert "were not computed like those that" in words
    assert values["harness"]["kernel_mismatch"] in words


def test_a_drafter_that_does_not_beat_the_baselines_is_said_not_to(fresh: Drawn) -> None:
    assert "not clearly above that yet" not in Page(fresh.text).text
    for path in fresh.inputs.evaluations:
        if path.endswith("unigram/fresh.json"):
            values = json.loads(Path(path).read_text())
            values["chain"] |= {"tau": 9.0, "ci95": [8.0, 10.0]}
            Path(path).write_text(json.dumps(values))
    words = Page(page.render(fresh.inputs, fresh.config, made.record("report", "results/report.html"))).text
    assert "What was learnt is not clearly above that yet" in words


def test_ids_made_from_text_are_counted(fresh: Drawn) -> None:
    assert "made from a server's text" not in Page(fresh.text).text
    for path, count in zip(fresh.inputs.completions, (1234,), strict=True):
        facts = {
            name: provenance.parquet_facts(path, name) for name in ("counts", "engine", "engine_version", "sampling")
        }
        table = provenance.read_parquet(path)
        provenance.write_parquet(path, table, provenance.read(path), {**facts, "retokenized": count})
    words = " ".join(Page(page.render(fresh.inputs, fresh.config, made.record("report", "r.html"))).text.split())
    assert "The ids of 1,234 of these completions were made from a server's text" in words


def test_runs_are_those_of_the_artifacts_at_hand(fresh: Drawn) -> None:
    inputs = fresh.inputs
    other = Path("results/logs/completions/9999.run.json")
    facts = json.loads(Path("results/logs/completions/0000.run.json").read_text())
    other.write_text(json.dumps({**facts, "id": "of another run"}))
    Path("results/logs/completions/0007.run.json").write_text("{")  # Its job was killed while it wrote this.
    stages = {stage.rule: stage for stage in runs.stages(inputs.all())}
    assert [job.name for job in stages["completions"].jobs] == ["0000"]
    assert stages["completions"].seconds == 55
    # Hidden states are no input of the report, but of what is.
    assert len(stages["hidden_states"].jobs) == 1
    assert list(stages)[:2] == ["target", "prompts"]


def test_report_without_run_records_says_so(fresh: Drawn) -> None:
    inputs, config = fresh.inputs, fresh.config
    for note in Path("results/logs").glob("*/*.run.json"):
        note.unlink()
    text = page.render(inputs, config, made.record("report", "results/report.html"))
    assert "No run records lie in results/logs" in text


def test_mask_histogram_counts_every_sample_once(demo: Drawn) -> None:
    inputs = demo.inputs
    table = provenance.read_parquet(inputs.mask)
    found = data.masks(inputs.mask)
    assert found.rows == len(table) == sum(int(s.finished.sum() + s.cut.sum()) for s in found.sources)
    assert found.tokens == sum(table["mask_sum"].to_pylist())
    assert sum(int(s.cut.sum()) for s in found.sources) == table["finished"].to_pylist().count(False)
    chat = next(source for source in found.sources if source.name == "chat")
    own = [v for v, s in zip(table["mask_sum"].to_pylist(), table["source"].to_pylist()) if s == "chat"]
    assert chat.common == max(set(own), key=own.count) == 6
    assert len(set(np.diff(found.edges))) == 1


def test_tokens_of_a_sample_join_to_the_decoded_whole(demo: Drawn) -> None:
    inputs = demo.inputs
    chat = Chat.load(inputs.manifest, inputs.tokenizer)
    ids = chat.encode(made.PROMPT + made.THINKING + made.ANSWER)
    pieces = data.pieces(ids, chat)
    assert "".join(pieces) == chat.decode(ids)
    assert "🙂" in "".join(pieces)
    assert data.REPLACEMENT not in "".join(pieces)
    assert len(pieces) > 50


@pytest.mark.parametrize(
    ("ids", "spans", "kinds"),
    [
        ([1, 7, 2, 8, 3], [1, 5], "c t t t a"),  # The block opens in the answer.
        ([1, 7, 2, 8, 3], [2, 5], "c c t t a"),  # The prompt opens it.
        ([1, 7, 2, 3, 4], [1, 5], "c t t t t"),  # It is never closed.
        ([1, 2, 3, 4, 5], [1, 2, 4, 5], "c a c c a"),  # Two turns, no block.
    ],
)
def test_think_block_and_answer_are_told_apart(ids: list[int], spans: list[int], kinds: str) -> None:
    names = {"c": "context", "t": "think", "a": "answer"}
    assert data.token_kinds(ids, spans, think_open=7, think_close=8) == [names[letter] for letter in kinds.split()]


def test_long_samples_are_shown_in_excerpts_around_what_matters(demo: Drawn) -> None:
    inputs = demo.inputs
    manifest, chat = Manifest.load(inputs.manifest), Chat.load(inputs.manifest, inputs.tokenizer)
    (source, *_) = found = data.samples(inputs.tokens[0], manifest, chat, per_source=3, head=10, tail=5)
    long = found[source][2]
    kinds = [run.kind for run in long.runs]
    assert kinds[0] == "context"
    assert kinds[-1] == "answer"
    gaps = [int(run.pieces[0].replace(",", "")) for run in long.runs if run.kind == "gap"]
    assert sum(gaps) == long.length - 10 - 20 - 5


def test_whitespace_of_a_sample_is_shown_and_kept() -> None:
    assert page.visible("a  b\n\tc <x>") == "a  b<u>↵</u>\n<u>→</u>\tc &lt;x&gt;"


def test_curves_are_binned_means_of_all_steps() -> None:
    steps = np.arange(1000.0)
    values = np.where(steps % 2 == 0, 1.0, 3.0)
    values[500] = np.nan
    curve = training.thin(steps, values)
    assert len(curve.mean) == training.POINTS
    assert curve.mean == pytest.approx(2.0, abs=0.1)
    assert (curve.low == 1).all()
    assert (curve.high == 3).all()


def test_metrics_of_all_segments_are_one_curve(demo: Drawn) -> None:
    inputs = demo.inputs
    (demo,) = training.trainings(inputs.metrics)
    assert (demo.drafter, demo.steps, demo.epochs, demo.ends) == ("demo", 740, 12, {1: 369, 2: 739})
    assert demo.tokens == 740 * 1100


def test_course_ends_with_the_finished_drafter(large: Drawn) -> None:
    inputs = large.inputs
    course = Accepted.read(inputs.evaluations).course("full", "gsm8k", last=3)
    assert [(number, evaluation.segment) for number, evaluation in course] == [(1, 1), (2, 2), (3, None)]


def test_trained_drafters_stand_before_the_baselines_in_config_order(large: Drawn) -> None:
    inputs = large.inputs
    accepted = Accepted.read(inputs.evaluations)
    assert [e.drafter for e in accepted.of("gsm8k")] == ["full", "sliding", "untrained", "unigram"]
    assert accepted.ways("gsm8k") == ["chain", "DDTree-8", "DDTree-64"]


def test_only_an_interval_above_all_baselines_counts_as_above(fresh: Drawn) -> None:
    inputs = fresh.inputs
    accepted = Accepted.read(inputs.evaluations)
    demo, untrained, _ = accepted.of("fresh")
    assert accepted.above_baselines(demo, "chain")
    assert not accepted.above_baselines(untrained, "chain")
    overlapping = dataclasses.replace(demo, tau={"chain": Tau(2.0, untrained.tau["chain"].high, 3.0)})
    assert not accepted.above_baselines(overlapping, "chain")


def test_an_evaluation_that_lacks_a_key_is_refused_by_path(fresh: Drawn) -> None:
    provenance.write_json("results/evaluation/demo/x.json", {"drafter": "demo"}, made.record("evaluate", "x"))
    with pytest.raises(DraftlineError, match=r"results/evaluation/demo/x\.json: .*delete it and run again"):
        Accepted.read(["results/evaluation/demo/x.json"])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 3, [1, 1.5, 2, 2.5, 3]), (0, 740, [0, 200, 400, 600]), (2, 2, [2])],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "largest", "expected"),
    [(0.25, 1, "0.25"), (5000, 9000, "5,000"), (5000, 15000, "5k"), (2e6, 3e6, "2M"), (0, 3e6, "0")],
)
def test_tick_labels_are_short(value: float, largest: float, expected: str) -> None:
    assert charts.number(value, largest) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(3.21, "3.2 s"), (59, "59 s"), (200, "3.3 min"), (7200, "2.0 h")])
def test_durations_are_for_people(seconds: float, expected: str) -> None:
    assert page.duration(seconds) == expected


@pytest.mark.parametrize(("count", "expected"), [(999, "999 B"), (1.2e9, "1.2 GB"), (6.45e14, "645 TB")])
def test_sizes_are_for_people(count: float, expected: str) -> None:
    assert page.size(count) == expected
