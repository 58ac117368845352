"""Normalize, clean and deduplicate the prompts, keep them clear of the evaluation sets, and split them into shards."""

from pathlib import Path

from draftline.cli import Command, Job
from draftline.fingerprint import SCRIPTS

command = Command("prompts", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("benches", many=True, help="prompts of the evaluation sets to keep clear of")
command.output("outputs", many=True, help="one file a shard")


def work(job: Job) -> None:
    from draftline import sources
    from draftline.chat import Chat
    from draftline.curation import Curation, Spool
    from draftline.overlap import Overlap
    from draftline.prompts import read_prompts, write_prompts

    settings, workflow = job.config["prompts"], SCRIPTS.parent
    chat = Chat.load(job.manifest, job.tokenizer)
    evaluation = Overlap(row.problem for bench in job.benches for row in read_prompts(bench))
    spool = Spool(Path(job.outputs[0]).parent)
    counts = Curation(settings, chat, evaluation, spool).run(workflow)
    job.check_sources(sources.prompts(settings["sources"], workflow, sources.DIGESTS))
    for output, rows in zip(job.outputs, spool.shards(job.config["shards"]), strict=True):
        write_prompts(output, rows, job.record, counts)


if __name__ == "__main__":
    command.run(work)
