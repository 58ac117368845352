"""Presets fit the schema, and tap and mask what the released drafters do, with neither target nor prompts at hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.utils import validate

from draftline import config as checks

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = ROOT / "schemas" / "config.schema.yaml"


def resolved(name: str) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))
    checks.check_schema(config, yaml.safe_load(SCHEMA.read_text(encoding="utf-8")))
    validate(config, str(SCHEMA))
    checks.check(config)
    return config


@pytest.mark.parametrize("path", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_passes_the_config_checks(path: Path) -> None:
    config = resolved(path.stem)
    assert not Path(config["target"]["path"]).exists()


@pytest.mark.parametrize(
    ("name", "layers", "num_layers", "mask", "hidden_bytes"),
    [
        ("qwen3.6-27b", [1, 16, 31, 46, 61], 64, 248070, 51_200),
        ("qwen3-8b", [1, 9, 17, 25, 33], 36, 151669, 40_960),
    ],
)
def test_layers_and_mask_are_those_of_the_released_drafter(
    name: str, layers: list[int], num_layers: int, mask: int, hidden_bytes: int
) -> None:
    config = resolved(name)
    assert config["hidden_states"]["layers"] == layers == checks.layer_ids(5, num_layers, key="layers")
    assert config["target"]["mask_token_id"] == mask
    assert f"{hidden_bytes:,} bytes a token" in (ROOT / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def test_parts_of_the_27b_recipe_hold_about_four_million_tokens() -> None:
    config = resolved("qwen3.6-27b")
    parts = config["shards"] * config["hidden_states"]["parts_per_shard"]
    assert 914_000 * 2_100 / parts == pytest.approx(4e6, rel=0.1)
    assert config["segments"] % config["drafters"]["qwen3_6_27b_b16"]["epochs"] == 0


def test_a_drafter_id_out_of_the_target_is_refused_before_the_target_is_there() -> None:
    config = resolved("qwen3-8b")
    config["hidden_states"]["layers"] = [1, 9, 17, 25, 35]
    with pytest.raises(checks.DraftlineError, match=r"hidden_states\.layers.*0\.\.34"):
        checks.check(config)
