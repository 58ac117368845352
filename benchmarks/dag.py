"""Time and memory of a dry run of a large preset, beside a bare Snakemake graph of as many jobs.

    .venv/bin/python benchmarks/dag.py --shards 1250 --parts 5

The bare workflow has the same jobs, files and edges, and nothing else: no settings, gates, resources, logs or checks.
Both sides run alternately; the table gives medians and spread of wall time, CPU time and peak memory.
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

BARE = """
S = [f"{{n:04d}}" for n in range({shards})]
P = [f"{{n:04d}}" for n in range({parts})]
N = {segments}
EPOCHS = {epochs}
PARTS = [f"results/hidden_states/{{s}}/{{p}}" for s in S for p in P]

def parts(wildcards):
    total, n = EPOCHS * len(PARTS), int(wildcards.n)
    visits = range(total * (n - 1) // N, total * n // N)
    return list(dict.fromkeys(PARTS[visit % len(PARTS)] for visit in visits))

rule all:
    input: expand("results/prompts/{{s}}", s=S), expand("results/completions/{{s}}", s=S),
           expand("results/tokens/{{s}}", s=S), expand("results/gates/{{s}}", s=S), PARTS,
           f"results/segments/{{N}}"
rule target:
    output: "results/target"
    shell: "touch {{output}}"
rule prompts:
    input: "results/target"
    output: expand("results/prompts/{{s}}", s=S)
    shell: "touch {{output}}"
rule completions:
    input: "results/target", "results/prompts/{{s}}"
    output: "results/completions/{{s}}"
    shell: "touch {{output}}"
rule tokens:
    input: "results/target", "results/completions/{{s}}"
    output: "results/tokens/{{s}}"
    shell: "touch {{output}}"
rule gate:
    input: "results/target", "results/tokens/{{s}}"
    output: "results/gates/{{s}}"
    shell: "touch {{output}}"
rule stats:
    input: expand("results/tokens/{{s}}", s=S)
    output: "results/stats"
    shell: "touch {{output}}"
rule hidden_states:
    input: "results/target", "results/tokens/{{s}}", "results/gates/{{s}}"
    output: "results/hidden_states/{{s}}/{{p}}"
    shell: "touch {{output}}"
rule train:
    input: lambda w: [f"results/segments/{{int(w.n) - 1}}"] if int(w.n) > 1 else [], "results/stats", parts
    output: "results/segments/{{n}}"
    shell: "touch {{output}}"
"""


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
        ours, bare = Path(scratch, "draftline"), Path(scratch, "bare")
        ours.mkdir()
        bare.mkdir()
        (ours / "preset.yaml").write_text(text)
        (bare / "Snakefile").write_text(BARE.format(shards=options.shards, parts=options.parts, **numbers))
        sides = {
            "draftline": [*snakemake, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(ours),
                          "--configfile", str(ours / "preset.yaml")],
            "bare": [*snakemake, "--snakefile", str(bare / "Snakefile"), "--directory", str(bare), "--cores", "2"],
        }  # fmt: skip
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
    for key in ("wall", "cpu", "mb"):
        ratio = statistics.median(r[key] for r in found["draftline"]) / statistics.median(r[key] for r in found["bare"])
        print(f"ratio of {key}: {ratio:.2f}")


if __name__ == "__main__":
    main()
