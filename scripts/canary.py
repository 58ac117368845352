"""Try the whole way to the hidden states on a few prompts of every source before the bulk starts."""

from draftline.cli import Command, Job

command = Command("canary", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("prompts", help="results/prompts/0000.parquet: one job makes all shards, so the first stands for them")
command.option("shards", required=True, type=int, metavar="N", help="how many shards there are")
command.output("output", help="results/gates/canary.json")


def work(job: Job) -> None:
    from pathlib import Path

    from draftline.canary import run_canary
    from draftline.chat import Chat
    from draftline.manifest import Manifest

    chat, manifest = Chat.load(job.manifest, job.tokenizer), Manifest.load(job.manifest)
    prompts = [str(Path(job.prompts).with_name(f"{shard:04d}.parquet")) for shard in range(job.shards)]
    run_canary(prompts, job.output, chat, manifest, job.config, job.run, job.record)


if __name__ == "__main__":
    command.run(work)
