import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_models
import torch
from bench_world import EVALUATE, LIMIT, SHAPE, World

from draftline import provenance, settings
from draftline.decode.draft import draft
from draftline.decode.live import Target, decode, proposer
from draftline.decode.tree import build_tree
from draftline.errors import DraftlineError
from draftline.evaluation import evaluate_drafter
from draftline.fingerprint import fingerprint
from draftline.states import StatesReader
from draftline.statistics import bootstrap_interval

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RUN = {"device": "cpu"}


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def found(world):
    return evaluate_drafter(**world.arguments(), config=EVALUATE, run=RUN)


@pytest.fixture
def llama(tmp_path):
    """A world of one's own, to break."""
    return World(tmp_path)


def rounds_by_hand(world, row, budget):
    """Accepted lengths and accepted draft tokens, anchor after anchor, by prefixes of the budget's own tree."""
    completion, sequence = row["completion_ids"], torch.tensor(row["prompt_ids"] + row["completion_ids"])
    context = world.drafter.context(world.features(sequence))
    place, lengths, accepted = 0, [], []
    while place < len(completion) - 1:
        anchor = torch.tensor([len(row["prompt_ids"]) + place])
        marginals = draft(world.drafter, world.heads, context[: anchor[0]], anchor, sequence[anchor], 32)
        tokens, log_probs = marginals.tokens[0], marginals.log_probs[0]
        behind = completion[place + 1 :]
        if budget is None:
            prefixes = {tuple(tokens[:depth, 0].tolist()) for depth in range(1, len(tokens) + 1)}
        else:
            tree = build_tree(0, tokens.tolist(), log_probs.tolist(), budget)
            prefixes = {
                tuple(tree.tokens[node] for node in path[1 : depth + 1])
                for path in tree.paths()
                for depth in range(1, len(path))
            }
        depth = 0
        while depth < len(behind) and tuple(behind[: depth + 1]) in prefixes:
            depth += 1
        accepted.append(depth)
        lengths.append(min(depth + 1, len(behind)))
        place += lengths[-1]
    return lengths, accepted


@pytest.mark.parametrize("budget", [None, 4, 16, 300])
def test_figures_are_those_of_rounds_played_by_hand(world, found, budget):
    entry = found["chain"] if budget is None else found["ddtree"][str(budget)]
    method = "chain" if budget is None else str(budget)
    rows = [row for row in world.rows if len(row["completion_ids"]) > 1]
    played = [rounds_by_hand(world, row, budget) for row in rows]
    means = [np.mean(lengths) for lengths, _ in played]
    lengths = [length for of_prompt, _ in played for length in of_prompt]
    accepted = [depth for _, of_prompt in played for depth in of_prompt]
    assert entry["tau"] == pytest.approx(np.mean(means))
    assert entry["tau_pooled"] == pytest.approx(np.mean(lengths))
    assert entry["histogram"] == [lengths.count(length) for length in range(7)]
    assert entry["rounds"] == len(lengths)
    assert entry["ci95"][0] <= entry["tau"] <= entry["ci95"][1]
    assert [prompt["id"] for prompt in found["per_prompt"]] == [row["id"] for row in rows]
    assert [prompt["tau"][method] for prompt in found["per_prompt"]] == pytest.approx(means)
    assert [prompt["rounds"][method] for prompt in found["per_prompt"]] == [len(of_prompt) for of_prompt, _ in played]
    if budget is None:
        shares = [np.mean([depth >= slot for depth in accepted]) for slot in range(1, 6)]
        assert entry["per_position"] == pytest.approx(shares)
        assert found["rounds"] == len(lengths)
    assert sum(lengths) == sum(len(row["completion_ids"]) - 1 for row in rows)
    assert budget != 300 or max(lengths) > 2


@pytest.mark.parametrize("budget", [None, 16])
def test_replay_from_files_equals_live_decoding(world, found, budget):
    means = []
    for row in world.rows:
        propose = proposer(world.drafter, world.heads, budget or 1)
        live = decode(
            Target(world.model, small_models.TAPPED), propose, row["prompt_ids"], LIMIT, [small_models.STOP], budget
        )
        assert live.completion_ids == row["completion_ids"]
        means += [np.mean(live.rounds.lengths)] if live.rounds.lengths else []
    entry = found["chain"] if budget is None else found["ddtree"][str(budget)]
    assert entry["tau"] == pytest.approx(np.mean(means))


def test_batch_and_further_budgets_change_no_figure(world, found):
    evaluated = evaluate_drafter(**world.arguments(), config={**EVALUATE, "budgets": [16]}, run={**RUN, "batch": 7})
    assert evaluated["ddtree"]["16"] == found["ddtree"]["16"]
    assert evaluated["chain"] == found["chain"]


def test_the_harness_says_what_was_measured(world, found):
    harness = found["harness"]
    assert (harness["mode"], harness["temperature"], harness["thinking"]) == ("replay", 0, False)
    assert (harness["block_size"], harness["budgets"], harness["max_new_tokens"]) == (6, [4, 16, 300], LIMIT)
    assert harness["states"]["storage"] == "fp32"
    assert harness["states"]["kernels"] == {"full_attention": "sdpa"}
    assert harness["target"]["weights_sha256"] == world.manifest.weights_sha256
    assert harness["training_states"] is None


def test_the_bootstrap_interval_is_that_of_a_normal_mean():
    values = np.random.default_rng(0).normal(3, 2, size=400)
    low, high = bootstrap_interval(values, resamples=4000, seed=1)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)
    assert bootstrap_interval(values, 100, seed=1) == bootstrap_interval(values, 100, seed=1)
    assert bootstrap_interval([2.5], 100, seed=1) == (2.5, 2.5)


def refusal(world):
    with pytest.raises(DraftlineError) as error:
        evaluate_drafter(**world.arguments(), config=EVALUATE, run=RUN)
    return str(error.value)


def test_states_of_other_layers_are_refused_by_both_paths(llama):
    llama.write_states(llama.rows, layers=(1, 2))
    message = refusal(llama)
    assert llama.path("states.safetensors") in message
    assert llama.path("weights.safetensors") in message
    assert "[0, 2]" in message
    assert "[1, 2]" in message


def test_states_of_another_target_are_refused_by_path(llama):
    llama.write_states(llama.rows, weights_sha256="f" * 64)
    assert llama.path("states.safetensors") in refusal(llama)


def test_a_drafter_of_another_target_is_refused_by_both_paths(llama):
    facts = {
        "config": llama.drafter.config.to_json(),
        "states": {"target": {"name": "other", "weights_sha256": "f" * 64}},
    }
    record = provenance.read(llama.path("weights.safetensors"))
    provenance.write_safetensors(llama.path("weights.safetensors"), llama.drafter.state_dict(), record, facts)
    message = refusal(llama)
    assert llama.path("states.safetensors") in message
    assert llama.path("weights.safetensors") in message


FALLBACK = {"chunk_gated_delta_rule": "torch", "causal_conv1d_fn": "torch"}
LIBRARY = {"chunk_gated_delta_rule": "fla", "causal_conv1d_fn": "causal_conv1d"}


def learned_from(world, **facts):
    """Let the drafter say that it learned from states with these facts."""
    states = {**StatesReader(world.path("states.safetensors")).facts, **facts}
    record = provenance.read(world.path("weights.safetensors"))
    made = {"config": world.drafter.config.to_json(), "states": states}
    provenance.write_safetensors(world.path("weights.safetensors"), world.drafter.state_dict(), record, made)


@pytest.mark.parametrize(("training", "evaluation"), [(LIBRARY, FALLBACK), (FALLBACK, LIBRARY)])
def test_states_of_other_kernels_than_training_had_are_refused_with_both_named(llama, training, evaluation):
    llama.write_states(llama.rows, kernels={"linear_attention": evaluation})
    learned_from(llama, kernels={"linear_attention": training})
    message = refusal(llama)
    named = (llama.path("states.safetensors"), llama.path("weights.safetensors"), str(training), str(evaluation))
    for text in (*named, "evaluate.allow_kernel_mismatch"):
        assert text in message


def test_an_allowed_mismatch_is_measured_and_named_in_the_harness(llama):
    alike = evaluate_drafter(**llama.arguments(), config=EVALUATE, run=RUN)
    learned_from(llama, kernels={"full_attention": "fla"})
    found = evaluate_drafter(**llama.arguments(), config={**EVALUATE, "allow_kernel_mismatch": True}, run=RUN)
    assert found["chain"] == alike["chain"]
    assert alike["harness"]["kernel_mismatch"] is None
    assert found["harness"]["kernel_mismatch"] == (
        "kernels {'full_attention': 'sdpa'}, in training {'full_attention': 'fla'}"
    )


def test_another_storage_or_version_in_training_is_no_mismatch(llama):
    learned_from(llama, storage="fp8_e4m3", versions={"torch": "1"})
    found = evaluate_drafter(**llama.arguments(), config=EVALUATE, run=RUN)
    assert found["harness"]["kernel_mismatch"] is None
    assert found["harness"]["training_states"]["storage"] == "fp8_e4m3"


def test_states_of_other_samples_or_tokens_are_refused_by_both_paths(llama):
    changed = [{**row, "completion_ids": [*row["completion_ids"][:-1], 9]} for row in llama.rows]
    for rows in (llama.rows[1:], changed):
        llama.write_completions(rows)
        message = refusal(llama)
        assert llama.path("states.safetensors") in message
        assert llama.path("completions.parquet") in message


def test_sampled_completions_are_refused(llama):
    llama.write_completions(llama.rows, temperature=0.7)
    assert "temperature 0.7" in refusal(llama)


def test_looping_and_failed_rows_are_counted(llama):
    rows = [dict(row) for row in llama.rows]
    rows[0]["status"] = "repetition"
    rows[1].update(status="error", completion_ids=[])
    rows[2].update(completion_ids=rows[2]["completion_ids"][:1])
    llama.write_completions(rows)
    llama.write_states(rows)
    found = evaluate_drafter(**llama.arguments(), config=EVALUATE, run=RUN)
    assert found["looping_share"] == pytest.approx(1 / len(rows))
    assert found["harness"]["prompts_without_rounds"] >= 2
    assert found["prompts"] + found["harness"]["prompts_without_rounds"] == len(rows)
    assert rows[1]["id"] not in [prompt["id"] for prompt in found["per_prompt"]]


def test_a_set_without_anything_to_draft_is_refused(llama):
    rows = [{**row, "completion_ids": row["completion_ids"][:1]} for row in llama.rows]
    llama.write_completions(rows)
    llama.write_states(rows)
    assert "evaluate.max_new_tokens" in refusal(llama)


COMMAND = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code, "transformers" in sys.modules, "torch" in sys.modules)
"""


def run_command(world, rule, config, output, *options):
    values = {"rule": rule, "config": config, "code": fingerprint(rule)}
    path = settings.write(values, world.folder / "settings" / rule)
    files = world.arguments("manifest", "heads", "completions", "states")
    options = [*options, *(text for name, file in files.items() for text in (f"--{name}", file))]
    command = [sys.executable, "-c", COMMAND, str(SCRIPTS / f"{rule}.py"), "--settings", str(path), "--threads", "1"]
    command += ["--run", json.dumps(RUN), "--bench", "small", "--output", world.path(output), *options]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SCRIPTS), "PATH": "/usr/bin"})


def test_the_command_writes_the_evaluation_without_transformers(llama):
    options = ("--drafter", "mine", "--weights", llama.path("weights.safetensors"))
    done = run_command(llama, "evaluate", {"evaluate": EVALUATE}, "out.json", *options)
    assert done.stdout.split() == ["0", "False", "True"], done.stderr
    written = json.loads(Path(llama.path("out.json")).read_text())
    assert (written["drafter"], written["bench"]) == ("mine", "small")
    assert written["chain"] == evaluate_drafter(**llama.arguments(), config=EVALUATE, run=RUN)["chain"]
    assert provenance.read(llama.path("out.json"))["rule"] == "evaluate"


@pytest.mark.parametrize("baseline", ["untrained", "unigram"])
def test_the_baseline_command_writes_the_evaluation_without_transformers(llama, baseline):
    options = ("--baseline", baseline, "--tokens", llama.path("tokens.parquet"))
    done = run_command(llama, "evaluate_baseline", {"evaluate": EVALUATE, "drafter": SHAPE}, "out.json", *options)
    assert done.stdout.split() == ["0", "False", "True"], done.stderr
    assert json.loads(Path(llama.path("out.json")).read_text())["drafter"] == baseline


def test_a_cut_file_is_refused_by_its_path_and_nothing_is_written(llama):
    states = Path(llama.path("states.safetensors"))
    states.write_bytes(states.read_bytes()[:-10])
    options = ("--drafter", "mine", "--weights", llama.path("weights.safetensors"))
    done = run_command(llama, "evaluate", {"evaluate": EVALUATE}, "out.json", *options)
    assert done.stdout.split()[0] == "1"
    assert str(states) in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(llama.path("out.json")).exists()
