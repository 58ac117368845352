"""Stop before training if the loss mask over all shards looks wrong."""

from draftline.cli import Command, Job

command = Command("mask_gate", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("tokens", many=True, help="results/tokens/*.parquet")
command.output("output", help="results/gates/mask.json")


def work(job: Job) -> None:
    from draftline.chat import Chat
    from draftline.mask_gate import gate_all

    chat = Chat.load(job.manifest, job.tokenizer)
    gate_all(job.tokens, job.output, chat.decode, job.config, job.record)


if __name__ == "__main__":
    command.run(work)
