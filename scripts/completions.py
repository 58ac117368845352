"""Let the target complete a shard of prompts. Finished rows are kept in results/.resume and never made twice."""

from draftline.cli import Command, Job

command = Command("completions", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("prompts", help="results/prompts/{shard}.parquet")
command.output("output", help="results/completions/{shard}.parquet")


def work(job: Job) -> None:
    from draftline.chat import Chat
    from draftline.completions import make_completions
    from draftline.manifest import Manifest

    chat, manifest = Chat.load(job.manifest, job.tokenizer), Manifest.load(job.manifest)
    make_completions(job.prompts, job.output, chat, manifest, job.config["completions"], job.run, job.record)


if __name__ == "__main__":
    command.run(work)
