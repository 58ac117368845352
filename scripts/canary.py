"""Try the whole way to the hidden states on a few prompts of every source before the bulk starts."""

from draftline.cli import Command, Job

command = Command("canary", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("prompts", many=True, help="results/prompts/*.parquet")
command.output("output", help="results/gates/canary.json")


def work(job: Job) -> None:
    from draftline.canary import run_canary
    from draftline.chat import Chat
    from draftline.manifest import Manifest

    chat, manifest = Chat.load(job.manifest, job.tokenizer), Manifest.load(job.manifest)
    run_canary(job.prompts, job.output, chat, manifest, job.config, job.run, job.record)


if __name__ == "__main__":
    command.run(work)
