"""Draftline: prompts and a target LLM in, a trained and evaluated DFlash drafter out, one declared file at a time."""

from snakemake.utils import min_version

min_version("9.20")


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/completions.smk"
include: "rules/engine_benchmark.smk"
include: "rules/tokens.smk"
include: "rules/hidden_states.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"


EVERYTHING = [
    TARGET,
    PROMPTS,
    COMPLETIONS,
    TOKENS,
    STATS,
    GATES,
    HIDDEN_STATES,
    DRAFTERS,
    BENCHES,
    EVALUATIONS,
    ENGINE_BENCHMARKS,
    REPORT,
]


rule all:
    """Every artifact that is kept."""
    default_target: True
    input:
        EVERYTHING,


PLAN.announce(flatten(EVERYTHING))
