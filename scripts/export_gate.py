"""Check a model folder by its names, shapes and config keys, and reload it."""

from draftline.cli import Command, Job

command = Command("export_gate", __doc__)
command.option("drafter", required=True, metavar="NAME", help="name below drafters in the config")
command.input("manifest")
command.input("heads")
command.input("state")
command.input("model", help="model.safetensors, with config.json beside it")
command.output("output")


def work(job: Job) -> None:
    from draftline.drafter.export_gate import check_export
    from draftline.manifest import Manifest

    check_export(job.model, job.state, Manifest.load(job.manifest), job.heads, job.output, job.record)


if __name__ == "__main__":
    command.run(work)
