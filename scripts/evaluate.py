"""Accepted lengths of a drafter, exported or kept at a checkpoint, on an evaluation set, replayed from the target's completions and hidden states."""

from draftline.cli import Command, Job

command = Command("evaluate", __doc__)
command.option("drafter", required=True, metavar="NAME", help="name below drafters in the config")
command.option("bench", required=True, metavar="NAME", help="name below benches in the config")
command.input("manifest")
command.input("heads")
command.input("weights", help="the model or a kept checkpoint (safetensors)")
command.input("completions")
command.input("states", help="hidden states of these completions")
command.output("output")


def work(job: Job) -> None:
    from draftline import provenance
    from draftline.evaluation import evaluate_drafter

    found = evaluate_drafter(
        job.weights, job.manifest, job.heads, job.completions, job.states, job.config["evaluate"], job.run
    )
    provenance.write_json(job.output, {"drafter": job.drafter, "bench": job.bench, **found}, job.record)


if __name__ == "__main__":
    command.run(work)
