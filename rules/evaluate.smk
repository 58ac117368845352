"""Evaluation: accepted lengths of chain and trees, replayed from the target's own completions and hidden states.

evaluate             a model folder and a bench  -> results/evaluation/{drafter}/{bench}.json
evaluate_checkpoint  kept weights and a bench    -> results/evaluation/{drafter}/checkpoints/{segment}/{bench}.json
evaluate_baseline    untrained or unigram        -> results/evaluation/{baseline}/{bench}.json
"""

EVALUATIONS = [
    expand("results/evaluation/{drafter}/{bench}.json", drafter=[*MODELS, "untrained", "unigram"], bench=SETS),
    [
        f"results/evaluation/{drafter}/checkpoints/{segment}/{bench}.json"
        for drafter in MODELS
        for segment in config["drafters"][drafter]["checkpoints"]
        for bench in SETS
    ],
]


rule evaluate:
    """Accepted lengths of an exported drafter on an evaluation set."""
    input:
        settings=settings("evaluate", per="drafter"),
        manifest=artifact("results/target/manifest.json"),
        heads=artifact("results/target/heads.safetensors"),
        weights=artifact("results/drafters/{drafter}/model/model.safetensors"),
        completions=artifact("results/benches/{bench}/completions.parquet"),
        states=artifact("results/benches/{bench}/hidden_states.safetensors"),
        gate=gate("results/gates/{drafter}/export.json"),
    output:
        evaluation="results/evaluation/{drafter}/{bench}.json",
    log:
        "results/logs/evaluate/{drafter}-{bench}.log",
    benchmark:
        "results/benchmarks/evaluate/{drafter}-{bench}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("evaluate"),
    params:
        command=command("evaluate"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --drafter {wildcards.drafter:q} --bench {wildcards.bench:q}"
        " --manifest {input.manifest:q} --heads {input.heads:q} --weights {input.weights:q}"
        " --completions {input.completions:q} --states {input.states:q} --output {output.evaluation:q}"


use rule evaluate as evaluate_checkpoint with:
    input:
        settings=settings("evaluate", per="drafter"),
        manifest=artifact("results/target/manifest.json"),
        heads=artifact("results/target/heads.safetensors"),
        weights=artifact("results/drafters/{drafter}/segments/{segment}/weights.safetensors"),
        completions=artifact("results/benches/{bench}/completions.parquet"),
        states=artifact("results/benches/{bench}/hidden_states.safetensors"),
    output:
        evaluation="results/evaluation/{drafter}/checkpoints/{segment}/{bench}.json",
    log:
        "results/logs/evaluate_checkpoint/{drafter}-{segment}-{bench}.log",
    benchmark:
        "results/benchmarks/evaluate_checkpoint/{drafter}-{segment}-{bench}.tsv"


rule evaluate_baseline:
    """Accepted lengths of what any drafter must beat: the first drafter untrained, and the labels' own frequencies."""
    input:
        settings=settings("evaluate_baseline"),
        manifest=artifact("results/target/manifest.json"),
        heads=artifact("results/target/heads.safetensors"),
        tokens=artifacts(lambda wildcards: TOKENS if wildcards.baseline == "unigram" else []),
        completions=artifact("results/benches/{bench}/completions.parquet"),
        states=artifact("results/benches/{bench}/hidden_states.safetensors"),
    output:
        evaluation="results/evaluation/{baseline}/{bench}.json",
    log:
        "results/logs/evaluate_baseline/{baseline}-{bench}.log",
    benchmark:
        "results/benchmarks/evaluate_baseline/{baseline}-{bench}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("evaluate_baseline"),
    params:
        command=command("evaluate_baseline"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --baseline {wildcards.baseline:q} --bench {wildcards.bench:q}"
        " --manifest {input.manifest:q} --heads {input.heads:q} --tokens {input.tokens:q}"
        " --completions {input.completions:q} --states {input.states:q} --output {output.evaluation:q}"
