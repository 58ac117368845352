"""The report: one self-contained page over everything that was made.

report  all of the above -> results/report.html
"""

REPORT = "results/report.html"


rule report:
    """Draw the report."""
    input:
        settings=settings("report"),
        manifest=artifact("results/target/manifest.json"),
        tokenizer=artifact("results/target/tokenizer.json"),
        prompts=artifact(*PROMPTS),
        completions=artifact(*COMPLETIONS),
        tokens=artifact(*TOKENS),
        mask=artifact("results/stats/mask.parquet"),
        gates=artifacts(lambda wildcards: list(flatten(GATES))),
        metrics=artifacts(lambda wildcards: list(DRAFTERS[0])),
        evaluations=artifacts(lambda wildcards: list(flatten(EVALUATIONS))),
    output:
        report=REPORT,
    log:
        "results/logs/report/report.log",
    benchmark:
        "results/benchmarks/report/report.tsv"
    localrule: on_submit_host("report")
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        **needs("report"),
    params:
        command=command("report"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --log {log:q}"
        " --manifest {input.manifest:q} --tokenizer {input.tokenizer:q} --prompts {input.prompts:q}"
        " --completions {input.completions:q} --tokens {input.tokens:q} --mask {input.mask:q}"
        " --gates {input.gates:q} --metrics {input.metrics:q} --evaluations {input.evaluations:q}"
        " --output {output.report:q}"
