"""Measure an engine on real prompts, at several numbers of requests in flight."""

from draftline.cli import Command, Job

command = Command("engine_benchmark", __doc__)
command.input("manifest", help="results/target/manifest.json")
command.input("tokenizer", help="results/target/tokenizer.json")
command.input("prompts", help="results/prompts/0000.parquet: one job makes all shards, so the first stands for them")
command.output("output", help="results/benchmarks/engine/{name}.json")


def work(job: Job) -> None:
    from draftline.chat import Chat
    from draftline.engine_benchmark import make_benchmark
    from draftline.manifest import Manifest

    chat, manifest = Chat.load(job.manifest, job.tokenizer), Manifest.load(job.manifest)
    make_benchmark(job.prompts, job.output, chat, manifest, job.config, job.run, job.record)


if __name__ == "__main__":
    command.run(work)
