"""Write a trained drafter as the model folder that SGLang, vLLM and the dflash package load."""

from draftline.cli import Command, Job

command = Command("export", __doc__)
command.option("drafter", required=True, metavar="NAME", help="name below drafters in the config")
command.input("manifest")
command.input("state")
command.output("model")
command.output("config")
command.output("card")


def work(job: Job) -> None:
    from draftline.drafter.export import export
    from draftline.manifest import Manifest

    export(
        drafter=job.drafter,
        state=job.state,
        manifest=Manifest.load(job.manifest),
        own_template=job.config["target"]["chat_template"],
        model=job.model,
        config=job.paths["config"],
        card=job.card,
        record=job.record,
    )


if __name__ == "__main__":
    command.run(work)
