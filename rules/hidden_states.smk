"""Hidden states of the tapped layers, and the gate on their numerics.

hidden_states        results/tokens/{shard}.parquet -> results/hidden_states/{shard}/{part}.safetensors
hidden_states_gate   the first part                 -> results/gates/hidden_states.json
bench_hidden_states  results/benches/{bench}/completions.parquet -> results/benches/{bench}/hidden_states.safetensors
"""

HIDDEN_STATES = expand("results/hidden_states/{shard}/{part}.safetensors", shard=SHARDS, part=PARTS)
BENCHES = expand(
    "results/benches/{bench}/{artifact}",
    bench=SETS,
    artifact=["prompts.parquet", "completions.parquet", "hidden_states.safetensors"],
)


rule hidden_states:
    """Run the target over a part of a shard and keep the tapped layers' outputs."""
    input:
        settings=settings("hidden_states"),
        manifest=artifact("results/target/manifest.json"),
        tokens=artifact("results/tokens/{shard}.parquet"),
        gates=gate("results/gates/canary.json", "results/gates/mask/{shard}.json"),
    output:
        states="results/hidden_states/{shard}/{part}.safetensors",
    log:
        "results/logs/hidden_states/{shard}-{part}.log",
    benchmark:
        "results/benchmarks/hidden_states/{shard}-{part}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("hidden_states"),
    params:
        command=command("hidden_states"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --tokens {input.tokens:q} --part {wildcards.part} --output {output.states:q}"


rule hidden_states_gate:
    """Compare the first part with an fp32 forward, batch size 1, neighbouring layers and shifted tokens."""
    input:
        settings=settings("hidden_states_gate"),
        manifest=artifact("results/target/manifest.json"),
        states=artifact("results/hidden_states/0000/0000.safetensors"),
    output:
        gate="results/gates/hidden_states.json",
    log:
        "results/logs/hidden_states_gate/hidden_states_gate.log",
    benchmark:
        "results/benchmarks/hidden_states_gate/hidden_states_gate.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("hidden_states_gate"),
    params:
        command=command("hidden_states_gate"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --states {input.states:q} --output {output.gate:q}"


rule bench_hidden_states:
    """Hidden states of an evaluation set's completions, so that evaluation never loads the target."""
    input:
        settings=settings("bench_hidden_states"),
        manifest=artifact("results/target/manifest.json"),
        completions=artifact("results/benches/{bench}/completions.parquet"),
    output:
        states="results/benches/{bench}/hidden_states.safetensors",
    log:
        "results/logs/bench_hidden_states/{bench}.log",
    benchmark:
        "results/benchmarks/bench_hidden_states/{bench}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: THREADS
    resources:
        **needs("bench_hidden_states"),
    params:
        command=command("bench_hidden_states"),
    shell:
        "{params.command} --settings {input.settings:q} --threads {threads} --gpus {resources.gpu} --log {log:q}"
        " --manifest {input.manifest:q} --completions {input.completions:q} --output {output.states:q}"
