"""Prompts: what the target is asked, for training and for evaluation.

bench_prompts  a bench of the config           -> results/benches/{bench}/prompts.parquet
prompts        prompt files, tokenizer, benches -> results/prompts/{shard}.parquet (all shards in one job)
"""

PROMPTS = expand("results/prompts/{shard}.parquet", shard=SHARDS)


rule bench_prompts:
    """Read an evaluation set."""
    input:
        settings=settings("bench_prompts", per="bench"),
    output:
        prompts="results/benches/{bench}/prompts.parquet",
    log:
        "results/logs/bench_prompts/{bench}.log",
    benchmark:
        "results/benchmarks/bench_prompts/{bench}.tsv"
    localrule: on_submit_host("bench_prompts")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("bench_prompts"),
    params:
        command=command("bench_prompts"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --bench {wildcards.bench:q} --output {output.prompts:q}"


rule prompts:
    """Normalize, clean and deduplicate the prompts, keep them clear of the evaluation sets, and split them into shards."""
    input:
        settings=settings("prompts"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        benches=artifact(*(f"results/benches/{bench}/prompts.parquet" for bench in config["prompts"]["decontaminate"])),
    output:
        shards=PROMPTS,
    log:
        "results/logs/prompts/prompts.log",
    benchmark:
        "results/benchmarks/prompts/prompts.tsv"
    localrule: on_submit_host("prompts")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("prompts"),
    params:
        command=command("prompts"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --benches {input.benches:q}"
        " --outputs {output.shards:q}"
