"""Engines measured beside each other; nothing is made from it.

engine_benchmark   a sample of the prompts -> results/benchmarks/engine/{name}.json, one for each of the config's engine_benchmarks
"""

ENGINE_BENCHMARKS = expand("results/benchmarks/engine/{name}.json", name=BENCHMARKED)


rule engine_benchmark:
    """Measure an engine on real prompts, at several numbers of requests in flight."""
    input:
        settings=settings("engine_benchmark", per="name"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        prompts=artifact(PROMPTS[0]),
    output:
        figures="results/benchmarks/engine/{name}.json",
    log:
        "results/logs/engine_benchmark/{name}.log",
    benchmark:
        "results/benchmarks/engine_benchmark/{name}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("engine_benchmark"),
    params:
        command=lambda wildcards: command("engine_benchmark", wildcards.name),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --prompts {input.prompts:q}"
        " --output {output.figures:q}"
