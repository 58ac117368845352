"""A copy of a model whose small files were changed since is no copy of it."""

import dataclasses
import json
from pathlib import Path

import pytest
from states_fixtures import save_target

from draftline import staging
from draftline.checkpoint import Checkpoint, weights_sha256
from draftline.staging import staged


@pytest.fixture
def manifest(tmp_path):
    found = save_target("llama", tmp_path / "model")
    (tmp_path / "model" / "modeling_own.py").write_text("SCALE = 1\n")
    yield dataclasses.replace(found, weights_sha256=weights_sha256(Checkpoint(Path(found.model))))
    for lock in staging._held:
        lock.close()
    staging._held.clear()


def release():
    """As if the jobs that used the copy had ended."""
    while staging._held:
        staging._held.pop().close()


def test_a_config_changed_beside_the_same_weights_is_copied_again(tmp_path, manifest):
    staged(manifest, str(tmp_path / "stage"))
    release()
    path = Path(manifest.model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.125}))
    copy = Path(staged(manifest, str(tmp_path / "stage")).model)
    assert json.loads((copy / "config.json").read_text())["rms_norm_eps"] == 0.125


def test_code_added_or_changed_beside_the_same_weights_is_copied_again(tmp_path, manifest):
    staged(manifest, str(tmp_path / "stage"))
    release()
    (Path(manifest.model) / "modeling_own.py").write_text("SCALE = 2\n")
    (Path(manifest.model) / "layers_own.py").write_text("")
    copy = Path(staged(manifest, str(tmp_path / "stage")).model)
    assert (copy / "modeling_own.py").read_text() == "SCALE = 2\n"
    assert (copy / "layers_own.py").exists()


def test_a_copy_serves_while_its_source_is_out_of_reach(tmp_path, manifest):
    first = staged(manifest, str(tmp_path / "stage"))
    Path(manifest.model).rename(tmp_path / "elsewhere")
    assert staged(manifest, str(tmp_path / "stage")).model == first.model
