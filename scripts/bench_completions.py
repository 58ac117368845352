"""Let the target complete an evaluation set, at temperature 0."""

from draftline.cli import Command, Job

command = Command("bench_completions", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("prompts", help="results/benches/{bench}/prompts.parquet")
command.output("output", help="results/benches/{bench}/completions.parquet")


def work(job: Job) -> None:
    from draftline.chat import Chat
    from draftline.completions import bench_config, make_completions
    from draftline.manifest import Manifest

    chat, manifest = Chat.load(job.manifest, job.tokenizer), Manifest.load(job.manifest)
    make_completions(job.prompts, job.output, chat, manifest, bench_config(job.config), job.run, job.record)


if __name__ == "__main__":
    command.run(work)
