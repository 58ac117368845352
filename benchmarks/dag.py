"""Time and memory of a dry run of a large preset, beside plain Snakemake graphs of as many jobs.

    .venv/bin/python benchmarks/dag.py --shards 1250 --parts 5

`bare` has the same jobs and files with inputs, output and shell alone. `plain` has what a published workflow has besides: log,
benchmark, environment, threads, resources and params. Neither has settings, gates or checks. The sides run in turn; the table gives
medians and spread of wall time, CPU time and peak memory.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRESET = ROOT / "presets" / "qwen3.6-27b.yaml"

HEAD = """
S = [f"{{n:04d}}" for n in range({shards})]
P = [f"{{n:04d}}" for n in range({parts})]
N = {segments}
EPOCHS = {epochs}
PARTS = [f"results/hidden_states/{{s}}/{{p}}" for s in S for p in P]

def parts(wildcards):
    total, n = EPOCHS * len(PARTS), int(wildcards.n)
    visits = range(total * (n - 1) // N, total * n // N)
    return list(dict.fromkeys(PARTS[visit % len(PARTS)] for visit in visits))

def before(wildcards):
    return [f"results/segments/{{int(wildcards.n) - 1}}"] if int(wildcards.n) > 1 else []

rule all:
    input: expand("results/prompts/{{s}}", s=S), expand("results/completions/{{s}}", s=S),
           expand("results/tokens/{{s}}", s=S), expand("results/gates/{{s}}", s=S), PARTS,
           f"results/segments/{{N}}"
"""
RULES = {
    "target": ("", '"results/target"', ""),
    "prompts": ('manifest="results/target"', 'expand("results/prompts/{s}", s=S)', ""),
    "completions": ('manifest="results/target", prompts="results/prompts/{s}"', '"results/completions/{s}"', "{s}"),
    "tokens": ('manifest="results/target", rows="results/completions/{s}"', '"results/tokens/{s}"', "{s}"),
    "gate": ('manifest="results/target", tokens="results/tokens/{s}"', '"results/gates/{s}"', "{s}"),
    "stats": ('tokens=expand("results/tokens/{s}", s=S)', '"results/stats"', ""),
    "hidden_states": (
        'manifest="results/target", tokens="results/tokens/{s}", gate="results/gates/{s}"',
        '"results/hidden_states/{s}/{p}"',
        "{s}-{p}",
    ),
    "train": ('state=before, stats="results/stats", parts=parts', '"results/segments/{n}"', "{n}"),
}
"""Name: inputs, output, and the wildcards of its log."""

DIRECTIVES = """    log: "results/logs/{name}/{log}.log"
    benchmark: "results/benchmarks/{name}/{log}.tsv"
    conda: "env.yaml"
    threads: 2
    resources: gpu=1, mem_mb=8000, runtime=720, disk_mb=100000
    params: command="exec python scripts/{name}.py --run '{{}}'"
    shell: "{{params.command}} --threads {{threads}} --gpus {{resources.gpu}} --log {{log:q}} --inputs {{input:q}} --output {{output:q}}"
"""


def snakefile(numbers: dict[str, int], directives: bool) -> str:
    """The same jobs in plain Snakemake: bare, or with the directives that a published workflow has."""
    text = HEAD.format(**numbers)
    for name, (inputs, output, log) in RULES.items():
        text += f"rule {name}:\n" + (f"    input: {inputs}\n" if inputs else "") + f"    output: {output}\n"
        text += DIRECTIVES.format(name=name, log=log or name) if directives else '    shell: "touch {output}"\n'
    return text


def scaled(shards: int, parts: int) -> tuple[str, dict[str, int]]:
    """The preset with other counts, and what the bare workflow has to know of it."""
    text = re.sub(r"^shards: \d+", f"shards: {shards}", PRESET.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^  parts_per_shard: \d+", f"  parts_per_shard: {parts}", text, flags=re.MULTILINE)
    numbers = {key: int(re.search(rf"^ *{key}: (\d+)", text, re.MULTILINE)[1]) for key in ("segments", "epochs")}
    return text, numbers


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Wall and CPU seconds, peak memory in MB, and the number of jobs of one dry run."""
    output = folder / "output"
    started = time.monotonic()
    pid = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - started
    text = output.read_text()
    if status:
        sys.exit(f"{' '.join(command)}: failed\n{text[-2000:]}")
    jobs = int(re.search(r"^total +(\d+)$", text, re.MULTILINE)[1])
    return {"wall": seconds, "cpu": usage.ru_utime + usage.ru_stime, "mb": usage.ru_maxrss / 1024, "jobs": jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1250)
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    text, numbers = scaled(options.shards, options.parts)
    snakemake = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules"]
    with tempfile.TemporaryDirectory() as scratch:
        ours = Path(scratch, "draftline")
        ours.mkdir()
        (ours / "preset.yaml").write_text(text)
        sides = {
            "draftline": [*snakemake, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(ours),
                          "--configfile", str(ours / "preset.yaml")],
        }  # fmt: skip
        for side in ("bare", "plain"):
            folder = Path(scratch, side)
            folder.mkdir()
            (folder / "env.yaml").write_text("dependencies: [python]\n")
            numbers |= {"shards": options.shards, "parts": options.parts}
            (folder / "Snakefile").write_text(snakefile(numbers, directives=side == "plain"))
            place = ["--snakefile", str(folder / "Snakefile"), "--directory", str(folder), "--cores", "2"]
            sides[side] = [*snakemake, *place]
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, command in sides.items():
                found[side].append(measure(command, Path(scratch)))
                print(side, json.dumps(found[side][-1]), file=sys.stderr, flush=True)
    print(f"{options.shards} shards x {options.parts} parts, {options.repeats} runs each, medians [least, most]")
    for side, runs in found.items():
        figures = {key: [run[key] for run in runs] for key in ("wall", "cpu", "mb")}
        cells = [f"{key} {statistics.median(v):.1f} [{min(v):.1f}, {max(v):.1f}]" for key, v in figures.items()]
        print(f"{side:>10}: {int(runs[0]['jobs'])} jobs; {'; '.join(cells)}")
    for side in ("bare", "plain"):
        ratios = [
            f"{key} {statistics.median(r[key] for r in found['draftline']) / statistics.median(r[key] for r in found[side]):.2f}"
            for key in ("wall", "cpu", "mb")
        ]
        print(f"draftline over {side}: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
