"""Accepted lengths of what any drafter must beat: the first drafter untrained, and the training labels' own frequencies."""

from draftline.cli import Command, Job

command = Command("evaluate_baseline", __doc__)
command.option("baseline", required=True, choices=["untrained", "unigram"])
command.option("bench", required=True, metavar="NAME", help="name below benches in the config")
command.input("manifest")
command.input("heads")
command.input("tokens", many=True, help="for unigram: all shards of tokens")
command.input("completions")
command.input("states", help="hidden states of these completions")
command.output("output")


def work(job: Job) -> None:
    from draftline import provenance
    from draftline.baselines import evaluate_baseline

    found = evaluate_baseline(
        job.baseline, job.manifest, job.heads, job.tokens, job.completions, job.states, job.config, job.run
    )
    provenance.write_json(job.output, {"drafter": job.baseline, "bench": job.bench, **found}, job.record)


if __name__ == "__main__":
    command.run(work)
