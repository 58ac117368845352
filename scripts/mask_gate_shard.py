"""Stop before a shard's hidden states if its loss mask looks wrong or the disk cannot take them."""

from draftline.cli import Command, Job

command = Command("mask_gate_shard", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("tokens", help="results/tokens/{shard}.parquet")
command.output("output", help="results/gates/mask/{shard}.json")


def work(job: Job) -> None:
    from draftline.chat import Chat
    from draftline.manifest import Manifest
    from draftline.mask_gate import gate_shard

    chat = Chat.load(job.manifest, job.tokenizer)
    gate_shard(job.tokens, job.output, chat.decode, Manifest.load(job.manifest), job.config, job.record)


if __name__ == "__main__":
    command.run(work)
