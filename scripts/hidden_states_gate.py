"""Compare a part of hidden states with a separate fp32 forward of the target."""

from draftline.cli import Command, Job

command = Command("hidden_states_gate", __doc__)
command.input("manifest", help="the target")
command.input("states", help="the part")
command.output("output", help="JSON file of the gate")


def work(job: Job) -> None:
    from draftline.manifest import Manifest
    from draftline.numerics_gate import check_part

    check_part(
        job.output, job.record, job.states, Manifest.load(job.manifest), job.config["hidden_states_gate"], job.run
    )


if __name__ == "__main__":
    command.run(work)
