"""Completions: the target answers.

canary             a few prompts of every source, through completions, tokens, mask and states -> results/gates/canary.json
completions        results/prompts/{shard}.parquet       -> results/completions/{shard}.parquet
bench_completions  results/benches/{bench}/prompts.parquet -> results/benches/{bench}/completions.parquet
"""

COMPLETIONS = expand("results/completions/{shard}.parquet", shard=SHARDS)


rule canary:
    """Try the whole way to the hidden states on a few prompts of every source before the bulk starts."""
    input:
        settings=settings("canary"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        # One job makes all shards. Naming each here would cost a large run, whose every job awaits this gate, much time.
        prompts=artifact(PROMPTS[0]),
    output:
        gate="results/gates/canary.json",
    log:
        "results/logs/canary/canary.log",
    benchmark:
        "results/benchmarks/canary/canary.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("canary"),
    params:
        command=command("canary"),
        shards=len(SHARDS),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --prompts {input.prompts:q}"
        " --shards {params.shards}"
        " --output {output.gate:q}"


rule completions:
    """Let the target complete a shard of prompts. Finished rows are kept in results/.resume and never made twice."""
    input:
        settings=settings("completions"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        prompts=artifact("results/prompts/{shard}.parquet"),
        gate=gate("results/gates/canary.json"),
    output:
        completions="results/completions/{shard}.parquet",
    log:
        "results/logs/completions/{shard}.log",
    benchmark:
        "results/benchmarks/completions/{shard}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("completions"),
    params:
        command=command("completions"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --prompts {input.prompts:q}"
        " --output {output.completions:q}"


rule bench_completions:
    """Let the target complete an evaluation set, at temperature 0."""
    input:
        settings=settings("bench_completions"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        prompts=artifact("results/benches/{bench}/prompts.parquet"),
    output:
        completions="results/benches/{bench}/completions.parquet",
    log:
        "results/logs/bench_completions/{bench}.log",
    benchmark:
        "results/benchmarks/bench_completions/{bench}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("bench_completions"),
    params:
        command=command("bench_completions"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --prompts {input.prompts:q}"
        " --output {output.completions:q}"
