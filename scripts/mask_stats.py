"""Loss-mask sums and lengths of all samples, their histogram, and how often each token is a label."""

from draftline.cli import Command, Job

command = Command("mask_stats", __doc__)
command.input("tokens", many=True, help="results/tokens/*.parquet")
command.output("mask", help="results/stats/mask.parquet")
command.output("labels", help="results/stats/tokens.parquet")
command.output("picture", help="results/stats/mask.png")


def work(job: Job) -> None:
    from draftline.mask_stats import make_stats

    make_stats(job.tokens, job.mask, job.labels, job.picture, job.record)


if __name__ == "__main__":
    command.run(work)
