"""Target model: what it is, and the parts of it that a drafter shares.

target  config.yaml's target -> results/target/{manifest.json, heads.safetensors, tokenizer.json}
"""

TARGET = multiext("results/target/", "manifest.json", "heads.safetensors", "tokenizer.json")


rule target:
    """Identify the target, cut out its embedding, norm and head, and convert it when it is no safetensors folder."""
    input:
        settings=settings("target"),
    output:
        manifest="results/target/manifest.json",
        heads="results/target/heads.safetensors",
        tokenizer="results/target/tokenizer.json",
    log:
        "results/logs/target/target.log",
    benchmark:
        "results/benchmarks/target/target.tsv"
    localrule: on_submit_host("target")
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("target"),
    params:
        command=command("target"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {output.manifest:q} --heads {output.heads:q} --tokenizer {output.tokenizer:q}"
