"""Records go into every kind of file and come back; torn and foreign files are refused by path."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest
import torch
from safetensors import safe_open

from draftline import provenance
from draftline.errors import DraftlineError

RECORD = {"rule": "tokens", "id": "a" * 16, "settings": "b" * 16, "inputs": {"results/x.json": "c" * 16}}


def write(path):
    if path.suffix == ".json":
        provenance.write_json(path, {"value": list(range(1000))}, RECORD)
    elif path.suffix == ".parquet":
        provenance.write_parquet(path, pa.table({"x": list(range(1000))}), RECORD, {"counts": {"a": 1}})
    else:
        provenance.write_safetensors(path, {"x": torch.arange(1000)}, RECORD, {"layers": [1, 2], "format": "pt"})


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".safetensors"])
def test_the_record_comes_back(tmp_path, suffix):
    write(tmp_path / f"x{suffix}")
    assert provenance.read(tmp_path / f"x{suffix}") == RECORD
    assert os.listdir(tmp_path) == [f"x{suffix}"]


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_refused_by_path(tmp_path, suffix, share):
    path = tmp_path / f"x{suffix}"
    write(path)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(DraftlineError, match=str(path)):
        provenance.read(path)


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".safetensors"])
def test_equal_work_gives_equal_bytes(tmp_path, suffix):
    one, two = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    write(one)
    write(two)
    assert one.read_bytes() == two.read_bytes()


def test_a_file_of_another_maker_is_refused_by_path(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(DraftlineError, match=rf"{path}: was not made by Draftline"):
        provenance.read(path)


def test_a_missing_file_names_the_target_to_ask_for(tmp_path):
    with pytest.raises(DraftlineError, match="no such file; make it with: snakemake"):
        provenance.read(tmp_path / "x.json")


def test_facts_come_back(tmp_path):
    write(tmp_path / "x.parquet")
    assert provenance.parquet_facts(tmp_path / "x.parquet", "counts") == {"a": 1}
    assert provenance.parquet_facts(tmp_path / "x.parquet", "other") is None


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "x.json"
    write(path)
    before = path.read_bytes()

    def fail():
        with provenance.replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write(path)
    before = path.read_bytes()
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from draftline import provenance\n"
        "with provenance.replacing(sys.argv[2]) as t: t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    scripts = os.path.dirname(os.path.dirname(provenance.__file__))
    assert subprocess.run([sys.executable, "-c", code, scripts, str(path)], check=False).returncode == -9
    assert path.read_bytes() == before


def test_the_id_depends_on_path_settings_and_inputs():
    one = provenance.identity("a", "s", {"x": "1"})
    others = [
        provenance.identity(*case) for case in [("b", "s", {"x": "1"}), ("a", "t", {"x": "1"}), ("a", "s", {"x": "2"})]
    ]
    assert len({one, *others}) == 4
    assert provenance.identity("a", "s", {"y": "2", "x": "1"}) == provenance.identity("a", "s", {"x": "1", "y": "2"})


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".safetensors"])
def test_a_new_stamp_leaves_the_content(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    write(path)
    provenance.restamp(path, {**RECORD, "accepted": {"why": "harmless"}})
    assert provenance.read(path)["accepted"] == {"why": "harmless"}
    provenance.restamp(path, RECORD)
    if suffix == ".json":
        assert json.loads(path.read_text())["value"] == list(range(1000))
    elif suffix == ".parquet":
        assert provenance.read_parquet(path)["x"].to_pylist() == list(range(1000))
        assert provenance.parquet_facts(path, "counts") == {"a": 1}
    else:
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor("x"), torch.arange(1000))
            assert file.metadata()["layers"] == "[1,2]"
