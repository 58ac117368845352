"""The tiny chain through profiles/slurm on a real SLURM: whom it gives GPUs, and what survives which kill.

One file, so that the tests share one cluster.
"""

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from slurm_box import Box, slurm, until, why_not
from slurm_run import SlurmRun, slurm_run

from draftline import provenance


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The running cluster. Another test run on this machine waits for this one's to end."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with filelock.FileLock("/run/lock/draftline-slurm-tests.lock"):
        box = Box(tmp_path_factory.mktemp("slurm"))
        try:
            box.start()
            yield box
        finally:
            box.stop()


@pytest.fixture(scope="module")
def finished(box: Box, tmp_path_factory: pytest.TempPathFactory) -> SlurmRun:
    """An undisturbed local run up to the last segment of training."""
    run = slurm_run(tmp_path_factory.mktemp("local") / "run")
    run.snakemake("results/drafters/small/segments/2/state.safetensors")
    return run


@pytest.fixture
def fresh(box: Box, tmp_path: Path) -> Iterator[SlurmRun]:
    run = slurm_run(tmp_path / "run")
    yield run
    end(run)


@pytest.fixture
def run(finished: SlurmRun, tmp_path: Path) -> Iterator[SlurmRun]:
    """A copy of the finished run."""
    run = SlurmRun(finished.copy(tmp_path / "run").folder)
    yield run
    end(run)


def end(run: SlurmRun) -> None:
    """Leave nothing of a test behind, whatever became of it."""
    for snakemake in run.started:
        snakemake.kill()
        snakemake.wait()
    ids = [job for job, _, _ in run.jobs("PENDING", "RUNNING", "COMPLETING")]
    if ids:
        subprocess.run(["scancel", *ids], check=False)
        until(lambda: not run.jobs("PENDING", "RUNNING", "COMPLETING"), "the test's jobs ended")
    for partition in ("gpu", "cpu"):
        subprocess.run(["scontrol", "update", f"partition={partition}", "state=UP"], check=True)


def partition_down(partition: str = "gpu") -> None:
    """Let jobs wait in the queue."""
    subprocess.run(["scontrol", "update", f"partition={partition}", "state=DOWN"], check=True)


def partition_up(partition: str = "gpu") -> None:
    subprocess.run(["scontrol", "update", f"partition={partition}", "state=UP"], check=True)


def gpus_in_use() -> list[tuple[str, str]]:
    """(node, index) of each GPU that a running job has, once for each job that has it."""
    found = []
    for job in slurm("scontrol", "show", "job", "-d").split("\n\n"):
        if "JobState=RUNNING" in job:
            for node, places in re.findall(r"Nodes=(\S+) .*GRES=gpu:h100:\d+\(IDX:([\d,-]+)\)", job):
                first, _, last = places.partition("-")
                found += [(node, str(place)) for place in range(int(first), int(last or first) + 1)]
    return found


def test_gpus_are_never_shared_and_a_cancelled_job_is_started_again(run, hold):
    """Six jobs for four GPUs, all in the queue at once; one is cancelled while it runs."""
    run.edit("tiny.yaml", "shards: 1", "shards: 6")
    run.snakemake("results/gates/canary.json")
    targets = [f"results/completions/{shard:04d}.parquet" for shard in range(6)]
    partition_down()
    hold.at("completions", "draftline.provenance", "write_parquet")
    snakemake = run.start(*targets, hold=hold)
    run.until_jobs(6, "PENDING")
    partition_up()
    hold.held("completions", 4)
    until(lambda: "Resources" in slurm("squeue", "-h", "--states=PENDING", "--format=%r"), "the others wait for a GPU")
    used = gpus_in_use()
    assert len(used) == len(set(used)) == 4
    subprocess.run(["scancel", run.jobs("RUNNING")[-1][0]], check=True)
    run.until_jobs(1, "CANCELLED")
    hold.release("completions")
    while snakemake.poll() is None:
        used = gpus_in_use()
        assert max(Counter(used).values(), default=0) <= 1, used
        time.sleep(0.3)
    assert snakemake.returncode == 0, run.log()
    assert len(run.jobs("CANCELLED")) == 1
    assert Counter(what for _, _, what in run.jobs("COMPLETED")) == {
        f"rule_completions_wildcards_{shard:04d}": 1 for shard in range(6)
    }
    for target in targets:
        assert provenance.read(run.folder / target)["rule"] == "completions"


def test_a_job_that_lacked_memory_gets_more(run, hold):
    """120 MB do not hold Snakemake and a command that waits for SLURM to see it; each further try has as much again."""
    run.edit("tiny.yaml", "run:\n", "run:\n  light: {where: jobs, mem_mb: 120}\n")
    (run.folder / "results/tokens/0000.parquet").unlink()
    hold.at("tokens", "draftline.provenance", "write_parquet")
    snakemake = run.start("results/tokens/0000.parquet", hold=hold)
    living = ("PENDING", "RUNNING", "COMPLETING")
    until(lambda: [job for job in run.jobs() if job[1] not in living], "the first try has ended")
    hold.release("tokens")
    run.finish(snakemake)
    jobs = run.jobs()
    assert [state for _, state, _ in jobs[-1:]] == ["COMPLETED"]
    assert len(jobs) > 1
    memory = [re.search(r"MinMemoryNode=(\d+)M", slurm("scontrol", "show", "job", job))[1] for job, _, _ in jobs]
    assert memory == [str(120 * attempt) for attempt in range(1, len(jobs) + 1)]
    assert "xceeded" in slurm_log(run, jobs[0][0])


def text(path: Path) -> str:
    """Content of a log; empty while it does not exist, as between two tries."""
    return path.read_text() if path.exists() else ""


def slurm_log(run: SlurmRun, job: str) -> str:
    (path,) = (run.folder / "results/logs/slurm").rglob(f"{job}.log")
    return path.read_text()


def test_a_job_that_waited_does_what_was_planned_or_nothing(run):
    """While two jobs wait in the queue, the config changes, which they ignore, then the code, which they refuse."""
    run.edit("tiny.yaml", "run:\n", "run:\n  light: {where: jobs}\n")
    target = run.folder / "results/tokens/0000.parquet"
    planned = provenance.read(target)["settings"]

    for path, old, new in (
        ("tiny.yaml", "max_length: 448", "max_length: 40"),
        ("scripts/draftline/tokens.py", "import numpy as np\n", "import numpy as np\n\nUNUSED = 1\n"),
    ):
        target.unlink(missing_ok=True)
        before = (run.folder / path).read_text()
        partition_down("cpu")
        snakemake = run.start("results/tokens/0000.parquet", "--retries", "0")
        run.until_jobs(1, "PENDING")
        run.edit(path, old, new)
        partition_up("cpu")
        if path == "tiny.yaml":
            run.finish(snakemake)
            assert provenance.read(target)["settings"] == planned
            assert run.pending("results/tokens/0000.parquet") == {"tokens": 1}
            (run.folder / path).write_text(before)
        else:
            assert snakemake.wait(1800) != 0
            assert not target.exists()
            job = run.jobs("FAILED")[-1][0]
            assert "tokens: scripts/: the code of tokens changed after this run was planned" in slurm_log(run, job)


def test_training_saves_on_sigterm_and_the_retry_goes_on(run, hold):
    """As at the time limit and at preemption, where SLURM sends the same signal to the same processes.

    It comes in the middle of the fifth step, which waits for it.
    """
    reference = SlurmRun(run.copy(run.folder.with_name("reference")).folder)
    for path in (run, reference):
        subprocess.run(["rm", "-r", path.folder / "results/drafters"], check=True)
    state = "results/drafters/small/segments/1/state.safetensors"
    hold.at("train_segment", "draftline.drafter.train", "Trainer.train", 5)
    snakemake = run.start(state, hold=hold)
    hold.held("train_segment")
    (job, _, _) = run.jobs("RUNNING")[0]
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    until(lambda: "stopped by SIGTERM" in slurm_log(run, job), "training has stopped")
    hold.release("train_segment")
    assert "after step 5 of" in slurm_log(run, job)
    run.finish(snakemake)
    assert "state.safetensors: step 5 of" in text(run.folder / "results/logs/train_segment/small-1.log")
    reference.snakemake(state)
    for path in (state, "results/drafters/small/segments/1/metrics.parquet"):
        assert (run.folder / path).read_bytes() == (reference.folder / path).read_bytes(), path


def test_a_job_that_is_killed_a_slurmd_that_is_killed_and_a_snakemake_that_is_killed(box, fresh, finished, hold):
    """No artifact is lost, none computed twice, none torn; all end as in an undisturbed local run."""
    target = "results/drafters/small/segments/2/state.safetensors"
    hold.at("canary", "draftline.provenance", "write_json")
    hold.at("completions", "draftline.rows", "RowStore.add", 4)
    hold.at("hidden_states", "draftline.states_writer", "StatesWriter.put", 3)
    snakemake = fresh.start(target, hold=hold)

    (canary,) = hold.held("canary")
    hold.release("canary")  # For the next one.
    canary.kill()

    hold.held("completions")
    node = slurm("squeue", "-h", "--states=RUNNING", "--format=%N")
    box.kill_node(node)
    time.sleep(2)
    box.start_node(node)
    hold.release("completions")

    hold.held("hidden_states")
    snakemake.send_signal(signal.SIGKILL)
    snakemake.wait()
    assert fresh.jobs("RUNNING", "COMPLETING")
    dry = fresh.snakemake("-n", target)
    assert "Error: Directory cannot be locked" in dry.stdout + dry.stderr
    subprocess.run([sys.executable, "scripts/unlock.py"], cwd=fresh.folder, check=True)
    again = fresh.start(target)
    until(
        lambda: "waiting for SLURM jobs of a killed run" in fresh.log(), "the next run waits for the killed one's jobs"
    )
    hold.release("hidden_states")
    fresh.finish(again)

    completed = Counter(what for _, _, what in fresh.jobs("COMPLETED"))
    assert max(completed.values()) == 1, completed
    assert len(fresh.jobs("FAILED")) == 1
    for path in sorted((finished.folder / "results").rglob("*.*")):
        name = path.relative_to(finished.folder)
        kind = name.parts[1]
        if path.is_file() and kind not in (".resume", "settings", "logs", "benchmarks", "target"):
            assert (fresh.folder / name).read_bytes() == path.read_bytes(), name
    assert not [path for path in fresh.folder.glob("results/**/.*.tmp*") if ".resume" not in path.parts]


def test_queued_jobs_of_a_killed_run_are_cancelled(run):
    """A dry run only names them; the next run cancels them, and no other folder's, and submits its own."""
    target = "results/completions/0000.parquet"
    elsewhere = ["-J", "draftline_elsewhere", "-D", str(run.folder.parent), "-o", "/dev/null", "--wrap", "true"]
    other = slurm("sbatch", "--parsable", "--hold", *elsewhere)
    (run.folder / target).unlink()
    partition_down()
    snakemake = run.start(target)
    old = {job for job, _, _ in run.until_jobs(1, "PENDING")}
    snakemake.send_signal(signal.SIGKILL)
    snakemake.wait()
    subprocess.run([sys.executable, "scripts/unlock.py"], cwd=run.folder, check=True)
    assert "SLURM jobs of a killed run are still here: " in run.snakemake("-n", target).stderr
    assert {job for job, _, _ in run.jobs("PENDING")} == old
    again = run.start(target)
    until(lambda: {job for job, _, _ in run.jobs("CANCELLED")} == old, "the old jobs are cancelled")
    partition_up()
    run.finish(again)
    assert len(run.jobs("COMPLETED")) == 1
    assert slurm("squeue", "-h", "-j", other, "--format=%T") == "PENDING"
    subprocess.run(["scancel", other], check=True)


def test_a_node_found_unfit_gets_no_job(run):
    """The files that a preflight leaves, read at submission."""
    bad = run.folder / "results/.resume/preflight/bad"
    bad.mkdir(parents=True)
    (bad / "gpu1.json").write_text("{}")
    (run.folder / "results/completions/0000.parquet").unlink()
    run.finish(run.start("results/completions/0000.parquet"))
    (job,) = run.jobs("COMPLETED")
    assert "ExcNodeList=gpu1" in slurm("scontrol", "show", "job", job[0])
