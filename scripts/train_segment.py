"""Train a drafter on the next stretch of (epoch, part) visits.

Killed and started again it goes on from its last checkpoint, about a minute back, and ends with the same state.
"""

from draftline.cli import Command, Job

command = Command("train_segment", __doc__)
command.option("drafter", required=True, metavar="NAME", help="name below drafters in the config")
command.option("segment", required=True, type=int, metavar="N", help="1 .. segments of the config")
command.input("manifest")
command.input("heads")
command.input("mask", help="stats/mask.parquet")
command.input("labels", help="stats/tokens.parquet")
command.input("previous", many=True, help="state of the segment before; none for the first")
command.input("parts", many=True, help="hidden states, in the order of their first visit")
command.output("state")
command.output("metrics")


def work(job: Job) -> None:
    from draftline.drafter.segment import train_segment
    from draftline.manifest import Manifest

    train_segment(
        config=job.config,
        drafter=job.drafter,
        segment=job.segment,
        manifest=Manifest.load(job.manifest),
        heads=job.heads,
        mask=job.mask,
        labels=job.labels,
        previous=job.previous[0] if job.previous else None,
        parts=job.parts,
        state=job.state,
        metrics=job.metrics,
        record=job.record,
        device=job.run["device"],
    )


if __name__ == "__main__":
    command.run(work)
