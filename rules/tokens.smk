"""Tokens and their loss mask, and the gate that reads the mask before a GPU is used on it.

tokens           results/completions/{shard}.parquet -> results/tokens/{shard}.parquet
mask_gate_shard  results/tokens/{shard}.parquet      -> results/gates/mask/{shard}.json
mask_stats       all tokens                          -> results/stats/{mask.parquet, tokens.parquet, mask.png}
mask_gate        all tokens                          -> results/gates/mask.json
"""

TOKENS = expand("results/tokens/{shard}.parquet", shard=SHARDS)
STATS = ["results/stats/mask.parquet", "results/stats/tokens.parquet", "results/stats/mask.png"]


rule tokens:
    """Join prompt and completion ids and mark what is trained on."""
    input:
        settings=settings("tokens"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        completions=artifact("results/completions/{shard}.parquet"),
    output:
        tokens="results/tokens/{shard}.parquet",
    log:
        "results/logs/tokens/{shard}.log",
    benchmark:
        "results/benchmarks/tokens/{shard}.tsv"
    localrule: on_submit_host("tokens")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("tokens"),
    params:
        command=command("tokens"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --completions {input.completions:q}"
        " --output {output.tokens:q}"


rule mask_gate_shard:
    """Stop before a shard's hidden states if its loss mask looks wrong or the disk cannot take them."""
    input:
        settings=settings("mask_gate_shard"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        tokens=artifact("results/tokens/{shard}.parquet"),
    output:
        gate="results/gates/mask/{shard}.json",
    log:
        "results/logs/mask_gate_shard/{shard}.log",
    benchmark:
        "results/benchmarks/mask_gate_shard/{shard}.tsv"
    localrule: on_submit_host("mask_gate_shard")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("mask_gate_shard"),
    params:
        command=command("mask_gate_shard"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --tokens {input.tokens:q}"
        " --output {output.gate:q}"


rule mask_stats:
    """Loss-mask sums and lengths of all samples, their histogram, and how often each token is a label."""
    input:
        settings=settings("mask_stats"),
        tokens=artifact(*TOKENS),
    output:
        mask="results/stats/mask.parquet",
        labels="results/stats/tokens.parquet",
        picture="results/stats/mask.png",
    log:
        "results/logs/mask_stats/mask_stats.log",
    benchmark:
        "results/benchmarks/mask_stats/mask_stats.tsv"
    localrule: on_submit_host("mask_stats")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("mask_stats"),
    params:
        command=command("mask_stats"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --tokens {input.tokens:q} --mask {output.mask:q} --labels {output.labels:q} --picture {output.picture:q}"


rule mask_gate:
    """Stop before training if the loss mask over all shards looks wrong."""
    input:
        settings=settings("mask_gate"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        tokens=artifact(*TOKENS),
    output:
        gate="results/gates/mask.json",
    log:
        "results/logs/mask_gate/mask_gate.log",
    benchmark:
        "results/benchmarks/mask_gate/mask_gate.tsv"
    localrule: on_submit_host("mask_gate")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("mask_gate"),
    params:
        command=command("mask_gate"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --tokens {input.tokens:q}"
        " --output {output.gate:q}"
