"""Code that a target brings along and that runs is part of the target; code that does not run is nothing."""

import dataclasses

import pytest
from states_fixtures import save_target

from draftline import sources
from draftline.completions import _answer_settings
from draftline.engines import Sampling


@pytest.mark.parametrize("trusted", [True, False])
def test_an_edit_of_trusted_code_makes_another_target(tmp_path, trusted):
    manifest = dataclasses.replace(save_target("llama", tmp_path / "model"), trust_remote_code=trusted)
    config = {"path": manifest.model, "trust_remote_code": trusted}
    code = tmp_path / "model" / "modeling_own.py"
    found = []
    for text in ("SCALE = 1", "SCALE = 2"):
        code.write_text(text)
        target = sources.target(config, tmp_path, tmp_path / "digests")
        found.append((target, _answer_settings(manifest, {"engine": "transformers"}, Sampling())))
    (target, answers), (other_target, other_answers) = found
    assert (target != other_target) == trusted
    assert (answers != other_answers) == trusted
