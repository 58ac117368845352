"""Run the target over an evaluation set's completions, so that evaluation never has to load it."""

from draftline.cli import Command, Job

command = Command("bench_hidden_states", __doc__)
command.input("manifest", help="the target")
command.input("completions", help="the set's completions")
command.output("output", help="safetensors file of the set's hidden states")


def work(job: Job) -> None:
    from draftline.hidden_states import bench_rows, make_states
    from draftline.manifest import Manifest

    config = job.config["hidden_states"]
    samples = bench_rows(job.completions)
    manifest = Manifest.load(job.manifest)
    make_states(job.output, job.record, samples, manifest, config["layers"], config["storage"], job.run)


if __name__ == "__main__":
    command.run(work)
