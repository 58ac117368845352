"""Read an evaluation set."""

from pathlib import Path

from draftline.cli import Command, Job
from draftline.fingerprint import SCRIPTS

command = Command("bench_prompts", __doc__)
command.option("bench", required=True, metavar="NAME", help="name of the evaluation set in the config")
command.output("output")


def work(job: Job) -> None:
    from draftline import sources
    from draftline.benches import bench_file, bench_rows
    from draftline.prompts import write_prompts

    bench, workflow = job.config["benches"][job.bench], SCRIPTS.parent
    path = bench_file(bench, workflow, Path("results/.resume/packages"))
    rows, counts = bench_rows(job.bench, bench, path)
    job.check_sources(sources.bench(bench, workflow, sources.DIGESTS))
    write_prompts(job.output, rows, job.record, {job.bench: counts})


if __name__ == "__main__":
    command.run(work)
