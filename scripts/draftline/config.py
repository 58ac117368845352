"""The config: checked once, against the schema and for what a schema cannot say.

Every complaint names the key by its path, the value, and what to do.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftline.engines import sglang_flags
from draftline.errors import DraftlineError
from draftline.layers import layer_ids

RESERVED_DRAFTERS = ("untrained", "unigram")
OF_BENCHMARK = ("engine", "concurrency", "prompts")
"""Keys of an entry of engine_benchmarks that are its own; all others take the place of a key of section `engine`."""


def check_schema(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise DraftlineError for the first unknown key, missing key or wrong value."""
    import jsonschema

    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(config), key=lambda e: list(map(str, e.path)))
    if not errors:
        return
    error = jsonschema.exceptions.best_match(errors)
    key = ".".join(map(str, error.absolute_path)) or "config"
    if error.validator == "additionalProperties":
        unknown = sorted(map(str, set(error.instance) - set(error.schema.get("properties", {}))))
        known = ", ".join(sorted(error.schema["properties"]))
        key = ".".join([*map(str, error.absolute_path), unknown[0]])
        raise DraftlineError(f"config: {key}: no such key; known here: {known}")
    if (
        "pattern" in error.schema
        and error.validator == "pattern"
        and error.schema["pattern"].startswith("^[A-Za-z0-9][")
    ):
        raise DraftlineError(
            f"config: {key}.{error.instance}: not a plain file name; use letters, digits, '-' and '_' only"
        )
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        inner = ".".join([*map(str, error.absolute_path), missing])
        raise DraftlineError(f"config: {inner}: missing; add it")
    if error.validator == "oneOf":
        ways = " | ".join("+".join(way["required"]) for way in error.validator_value)
        raise DraftlineError(f"config: {key}: needs exactly one of: {ways}")
    if error.validator == "type" and _is_number(error.instance):
        raise DraftlineError(f"config: {key}: {error.instance!r}: text to YAML; write a number with a point, as 1.0e-3")
    raise DraftlineError(
        f"config: {key}: {error.instance!r}: {error.message}; config.yaml or schemas/config.schema.yaml explains it"
    )


def check_keys(path: Path) -> None:
    """Raise DraftlineError for a key that stands twice in one place of a YAML file, where YAML would take the last."""
    nodes = [yaml.compose(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if key.value in names:
                    line = key.start_mark.line + 1
                    raise DraftlineError(
                        f"{path}: line {line}: {key.value}: stands here for the second time; remove one"
                    )
                names.add(key.value)
                nodes.append(value)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def check_benchmarks(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise DraftlineError for the first key of engine_benchmarks that section `engine` would not have."""
    engine = schema["properties"]["engine"]
    overrides = {name: _overrides(entry) for name, entry in config.get("engine_benchmarks", {}).items()}
    entries = {"properties": dict.fromkeys(overrides, engine)}
    check_schema(
        {"engine_benchmarks": overrides}, {"$defs": schema["$defs"], "properties": {"engine_benchmarks": entries}}
    )


def benchmark(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry of engine_benchmarks, with ``settings``: section `engine` as it is for this entry."""
    entry = config["engine_benchmarks"][name]
    own = {key: entry[key] for key in OF_BENCHMARK}
    return {**own, "settings": {**config["engine"], **_overrides(entry)}}


def _overrides(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in OF_BENCHMARK}


def check(config: Mapping[str, Any]) -> None:
    """Raise DraftlineError for what is well-formed but cannot work. `config` has its defaults filled in."""
    layers, known = config["hidden_states"]["layers"], config["target"]["num_layers"]
    if known is not None:
        layer_ids(layers, known, key="hidden_states.layers")
    elif isinstance(layers, list) and (layers != sorted(set(layers)) or layers[0] < 0):
        raise DraftlineError(f"config: hidden_states.layers: {layers}: must be ascending, without repeats, from 0 on")
    for name, drafter in config["drafters"].items():
        key = f"config: drafters.{name}"
        if name in RESERVED_DRAFTERS:
            raise DraftlineError(f"{key}: this name is taken by a baseline; choose another")
        types = drafter["layer_types"]
        if types is not None and len(types) != drafter["layers"]:
            raise DraftlineError(
                f"{key}.layer_types: {len(types)} entries for {drafter['layers']} layers; give one each"
            )
        if types is not None and "sliding_attention" in types and drafter["sliding_window"] is None:
            raise DraftlineError(
                f"{key}.sliding_window: missing, but layer_types has sliding_attention; give the window"
            )
        heads, kv_heads = drafter["heads"], drafter["kv_heads"]
        if heads and kv_heads and heads % kv_heads:
            raise DraftlineError(f"{key}.kv_heads: {kv_heads}: must divide heads, which are {heads}")
        late = [n for n in drafter["checkpoints"] if n > config["segments"]]
        if late:
            raise DraftlineError(f"{key}.checkpoints: {late[0]}: there are only {config['segments']} segments")
    for name in config["prompts"]["decontaminate"]:
        if name not in config["benches"]:
            known_benches = ", ".join(config["benches"])
            raise DraftlineError(f"config: prompts.decontaminate: {name}: no such bench; known: {known_benches}")
    sources = config["prompts"]["sources"]
    for waiver in config["mask_gate"]["waive"]:
        if waiver["source"] not in sources:
            raise DraftlineError(
                f"config: mask_gate.waive: {waiver['source']}: no such source; known: {', '.join(sources)}"
            )
    if (gpus := config["run"]["train_segment"].get("gpus", 1)) > 1:
        raise DraftlineError(f"config: run.train_segment.gpus: {gpus}: a segment trains on one GPU; set 1")
    _check_engine(config["completions"]["engine"], config["engine"], config)
    for name in config["engine_benchmarks"]:
        entry = benchmark(config, name)
        _check_engine(entry["engine"], entry["settings"], config)
    parts = config["shards"] * config["hidden_states"]["parts_per_shard"]
    for name, drafter in config["drafters"].items():
        if config["segments"] > parts * drafter["epochs"]:
            raise DraftlineError(
                f"config: segments: {config['segments']}: drafter {name} has only {parts * drafter['epochs']} part visits"
                f" ({parts} parts x {drafter['epochs']} epochs); lower segments"
            )


def _check_engine(kind: str, engine: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    if kind == "openai" and not engine["endpoints"]:
        raise DraftlineError(
            "config: engine.endpoints: empty, but the engine is openai; name the servers: [{url: ...}]"
        )
    if kind == "sglang":
        _check_sglang(engine, config["run"], config["target"]["dtype"])


def _check_sglang(engine: Mapping[str, Any], run: Mapping[str, Any], dtype: str) -> None:
    if run["device"] != "cuda":
        raise DraftlineError(
            f"config: run.device: {run['device']}: engine sglang works on GPUs that the job leases; set run.device: cuda"
        )
    if dtype == "float32":  # It would say so after a minute, when it captures its graphs.
        raise DraftlineError("config: target.dtype: float32: SGLang's GPU kernels have no float32; set bfloat16")
    needed, given = sglang_flags.gpus(engine), run["completions"].get("gpus")
    if given not in (None, needed):
        raise DraftlineError(
            f"config: run.completions.gpus: {given}: engine sglang takes tensor_parallel x data_parallel = {needed}; leave it out"
        )
    if reason := sglang_flags.refused(engine):
        raise DraftlineError(f"config: {reason}")
