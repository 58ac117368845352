"""Drafters: a chain of training segments, and the exported model.

train_segment    parts of hidden states, heads -> results/drafters/{drafter}/segments/{segment}/{state.safetensors, metrics.parquet}
keep_checkpoint  a segment's state             -> results/drafters/{drafter}/segments/{segment}/weights.safetensors
export           the last segment's state      -> results/drafters/{drafter}/model/{model.safetensors, config.json, README.md}
export_gate      the model folder              -> results/gates/{drafter}/export.json
"""

GATES = [
    "results/gates/canary.json",
    expand("results/gates/mask/{shard}.json", shard=SHARDS),
    "results/gates/mask.json",
    "results/gates/hidden_states.json",
    expand("results/gates/{drafter}/export.json", drafter=MODELS),
]
DRAFTERS = [
    expand("results/drafters/{drafter}/segments/{segment}/metrics.parquet", drafter=MODELS, segment=SEGMENTS),
    expand("results/drafters/{drafter}/segments/{segment}/state.safetensors", drafter=MODELS, segment=SEGMENTS[-1]),
    expand(
        "results/drafters/{drafter}/model/{file}",
        drafter=MODELS,
        file=["model.safetensors", "config.json", "README.md"],
    ),
    [
        f"results/drafters/{drafter}/segments/{segment}/weights.safetensors"
        for drafter in MODELS
        for segment in config["drafters"][drafter]["checkpoints"]
    ],
]


rule train_segment:
    """Train a drafter on the next stretch of (epoch, part) visits."""
    input:
        settings=settings("train_segment", per="drafter"),
        manifest=artifact("results/target/manifest.json"),
        heads=artifact("results/target/heads.safetensors"),
        mask=artifact("results/stats/mask.parquet"),
        labels=artifact("results/stats/tokens.parquet"),
        state=artifacts(previous_state),
        parts=artifacts(segment_parts),
        gates=gate("results/gates/mask.json", "results/gates/hidden_states.json"),
    output:
        state=temp("results/drafters/{drafter}/segments/{segment}/state.safetensors"),
        metrics="results/drafters/{drafter}/segments/{segment}/metrics.parquet",
    log:
        "results/logs/train_segment/{drafter}-{segment}.log",
    benchmark:
        "results/benchmarks/train_segment/{drafter}-{segment}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("train_segment"),
    params:
        command=command("train_segment"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --drafter {wildcards.drafter:q} --segment {wildcards.segment}"
        " --manifest {input.manifest:q} --heads {input.heads:q} --mask {input.mask:q} --labels {input.labels:q}"
        " --previous {input.state:q} --parts {input.parts:q}"
        " --state {output.state:q} --metrics {output.metrics:q}"


use rule train_segment as train_last_segment with:
    output:
        state=f"results/drafters/{{drafter}}/segments/{{segment,{SEGMENTS[-1]}}}/state.safetensors",
        metrics=f"results/drafters/{{drafter}}/segments/{{segment,{SEGMENTS[-1]}}}/metrics.parquet",


ruleorder: train_last_segment > train_segment


rule keep_checkpoint:
    """Keep a segment's weights, to evaluate them as a checkpoint."""
    input:
        settings=settings("keep_checkpoint", per="drafter"),
        state=artifact("results/drafters/{drafter}/segments/{segment}/state.safetensors"),
    output:
        weights="results/drafters/{drafter}/segments/{segment}/weights.safetensors",
    log:
        "results/logs/keep_checkpoint/{drafter}-{segment}.log",
    benchmark:
        "results/benchmarks/keep_checkpoint/{drafter}-{segment}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("keep_checkpoint"),
    params:
        command=command("keep_checkpoint"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --state {input.state:q} --weights {output.weights:q}"


rule export:
    """Write the drafter as the model folder that SGLang, vLLM and the dflash package load."""
    input:
        settings=settings("export", per="drafter"),
        manifest=artifact("results/target/manifest.json"),
        state=artifact(f"results/drafters/{{drafter}}/segments/{SEGMENTS[-1]}/state.safetensors"),
    output:
        model="results/drafters/{drafter}/model/model.safetensors",
        config="results/drafters/{drafter}/model/config.json",
        card="results/drafters/{drafter}/model/README.md",
    log:
        "results/logs/export/{drafter}.log",
    benchmark:
        "results/benchmarks/export/{drafter}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("export"),
    params:
        command=command("export"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --drafter {wildcards.drafter:q} --manifest {input.manifest:q} --state {input.state:q}"
        " --model {output.model:q} --config {output.config:q} --card {output.card:q}"


rule export_gate:
    """Check the model folder by its names, shapes and config keys, and reload it."""
    input:
        settings=settings("export_gate", per="drafter"),
        manifest=artifact("results/target/manifest.json"),
        heads=artifact("results/target/heads.safetensors"),
        state=artifact(f"results/drafters/{{drafter}}/segments/{SEGMENTS[-1]}/state.safetensors"),
        model=artifact("results/drafters/{drafter}/model/model.safetensors"),
    output:
        gate="results/gates/{drafter}/export.json",
    log:
        "results/logs/export_gate/{drafter}.log",
    benchmark:
        "results/benchmarks/export_gate/{drafter}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("export_gate"),
    params:
        command=command("export_gate"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --drafter {wildcards.drafter:q} --manifest {input.manifest:q} --heads {input.heads:q} --state {input.state:q}"
        " --model {input.model:q} --output {output.gate:q}"
