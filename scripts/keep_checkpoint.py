"""Keep a segment's weights, to evaluate them as a checkpoint."""

from draftline.cli import Command, Job

command = Command("keep_checkpoint", __doc__)
command.input("state")
command.output("weights")


def work(job: Job) -> None:
    from draftline.drafter.export import keep_checkpoint

    keep_checkpoint(job.state, job.weights, job.record)


if __name__ == "__main__":
    command.run(work)
