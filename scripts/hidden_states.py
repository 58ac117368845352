"""Run the target over a part of a shard of tokens and keep the tapped layers' outputs."""

from draftline.cli import Command, Job

command = Command("hidden_states", __doc__)
command.input("manifest", help="the target")
command.input("tokens", help="the shard")
command.option("part", required=True, type=int, metavar="N", help="which part of the shard, from 0 on")
command.output("output", help="safetensors file of the part")


def work(job: Job) -> None:
    from draftline.hidden_states import make_states, part_of_tokens
    from draftline.manifest import Manifest

    config = job.config["hidden_states"]
    samples = part_of_tokens(job.tokens, job.part, config["parts_per_shard"])
    manifest = Manifest.load(job.manifest)
    make_states(job.output, job.record, samples, manifest, config["layers"], config["storage"], job.run)


if __name__ == "__main__":
    command.run(work)
