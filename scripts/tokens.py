"""Join prompt and completion ids of a shard and mark what is trained on."""

from draftline.cli import Command, Job

command = Command("tokens", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("completions", help="results/completions/{shard}.parquet")
command.output("output", help="results/tokens/{shard}.parquet")


def work(job: Job) -> None:
    from draftline.manifest import Manifest
    from draftline.tokens import make_tokens

    make_tokens(job.completions, job.output, Manifest.load(job.manifest), job.config["tokens"], job.record)


if __name__ == "__main__":
    command.run(work)
