"""Identify the target, cut out its embedding, norm and head, and convert it when it is no safetensors folder."""

from pathlib import Path

from draftline.cli import Command, Job
from draftline.fingerprint import SCRIPTS

command = Command("target", __doc__)
command.output("manifest", help="results/target/manifest.json")
command.output("heads", help="results/target/heads.safetensors")
command.output("tokenizer", help="results/target/tokenizer.json")


def work(job: Job) -> None:
    from draftline import sources
    from draftline.target import make_target

    settings, workflow = job.config["target"], SCRIPTS.parent
    outputs = {name: Path(job.paths[name]) for name in ("manifest", "heads", "tokenizer")}
    job.check_sources(sources.target(settings, workflow, sources.DIGESTS))
    make_target(settings, workflow, outputs, job.record)


if __name__ == "__main__":
    command.run(work)
