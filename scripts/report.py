"""Draw the report: one self-contained page over everything that a run made."""

from draftline.cli import Command, Job

command = Command("report", __doc__)
command.input("manifest")
command.input("tokenizer")
command.input("prompts", many=True)
command.input("completions", many=True)
command.input("tokens", many=True)
command.input("mask")
command.input("gates", many=True)
command.input("metrics", many=True)
command.input("evaluations", many=True)
command.output("output")


def work(job: Job) -> None:
    from draftline.report.page import Inputs, make_report

    inputs = Inputs(
        manifest=job.manifest,
        tokenizer=job.tokenizer,
        prompts=job.prompts,
        completions=job.completions,
        tokens=job.tokens,
        mask=job.mask,
        gates=job.gates,
        metrics=job.metrics,
        evaluations=job.evaluations,
    )
    make_report(inputs, job.config, job.record, job.output)


if __name__ == "__main__":
    command.run(work)
