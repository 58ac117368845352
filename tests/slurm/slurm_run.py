"""The tiny chain run through profiles/slurm."""

import subprocess
import sys
from pathlib import Path

from slurm_box import slurm, until

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow"))

from tiny_run import Run, make_run

from hold import Hold


class SlurmRun(Run):
    """A copy of the workflow whose GPU rules ask for one GPU each, though they compute on the CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, hold: Hold | None = None) -> subprocess.Popen[bytes]:
        """Snakemake with the profile, in the background; its output goes to run.log. Its jobs wait where `hold` says."""
        command = [sys.executable, "-m", "snakemake", *arguments, "--configfile", "tiny.yaml"]
        with open(self.folder / "run.log", "ab") as log:
            snakemake = subprocess.Popen(
                [*command, "--workflow-profile", "profiles/slurm"],
                cwd=self.folder,
                env=hold and hold.environment,
                stdout=log,
                stderr=log,
            )
        self.started.append(snakemake)
        return snakemake

    def log(self) -> str:
        return (self.folder / "run.log").read_text()

    def finish(self, snakemake: subprocess.Popen[bytes]) -> None:
        assert snakemake.wait(1800) == 0, self.log()

    def jobs(self, *states: str) -> list[tuple[str, str, str]]:
        """(id, state, rule and wildcards) of this run's jobs in the order of their ids, ended ones too."""
        lines = slurm("squeue", "-h", "--states=all", "--format=%i|%T|%Z|%k").splitlines()
        found = [line.split("|") for line in lines]
        ours = sorted((int(job), state, what) for job, state, place, what in found if place == str(self.folder))
        return [(str(job), state, what) for job, state, what in ours if not states or state in states]

    def until_jobs(self, count: int, *states: str) -> list[tuple[str, str, str]]:
        until(lambda: len(self.jobs(*states)) >= count, f"{count} jobs are {' or '.join(states)}")
        return self.jobs(*states)


def slurm_run(folder: Path) -> SlurmRun:
    """A fresh copy, with the profile as a site edits it, with looks at the queue that suit jobs of seconds."""
    run = SlurmRun(make_run(folder).folder)
    run.edit("profiles/slurm/config.yaml", "&gpu {slurm_partition: gpu}", "&gpu {slurm_partition: gpu, gpu: 1}")
    run.edit("profiles/slurm/config.yaml", "seconds-before-status-checks: 20", "seconds-before-status-checks: 4")
    run.edit("profiles/slurm/config.yaml", "latency-wait: 60", "latency-wait: 10")
    run.edit("tiny.yaml", "sampling: {temperature: 1.0}", "sampling: {temperature: 0}")
    return run
