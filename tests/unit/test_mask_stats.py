"""Statistics of the mask: one row a sample, labels counted one by one, and a picture that carries its record."""

import struct
import zlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from draftline import provenance
from draftline.mask_stats import LABELS_SCHEMA, MASK_SCHEMA, make_stats
from draftline.tokens import SCHEMA

RECORD = {"rule": "mask_stats", "id": "é" * 16, "settings": "s" * 16, "inputs": {"results/tokens/0000.parquet": "t"}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shard(number, rows, seed=0):
    generator = np.random.default_rng(seed + number)
    samples = []
    for n in range(rows):
        length = int(generator.integers(20, 90))
        middle = int(generator.integers(5, 15))
        samples.append(
            {
                "id": f"{1000 * number + n:032x}",
                "source": ("chat", "code")[n % 2],
                "status": ("ok", "truncated")[n % 3 == 0],
                "input_ids": generator.integers(0, 50 + 100 * number, length).tolist(),
                "spans": [2, 4, middle, length],
                "finished": n % 3 != 0,
            }
        )
    path = f"results/tokens/{number:04d}.parquet"
    provenance.write_parquet(path, pa.Table.from_pylist(samples, SCHEMA), RECORD, {"counts": {}, "examples": {}})
    return path, samples


def stats(paths, folder="results/stats"):
    names = [f"{folder}/{name}" for name in ("mask.parquet", "tokens.parquet", "mask.png")]
    make_stats(paths, *names, RECORD)
    return names


def test_every_sample_has_its_row_and_every_label_its_count(folder):
    shards = [shard(0, 30), shard(3, 20)]
    mask, labels, _ = stats([path for path, _ in shards])
    rows, counts = [], Counter()
    for number, (_, samples) in zip((0, 3), shards):
        for sample in samples:
            spans = sample["spans"]
            answer = [t for a, b in zip(spans[::2], spans[1::2]) for t in sample["input_ids"][a:b]]
            counts.update(answer)
            row = {name: sample[name] for name in ("id", "source", "status")}
            row |= {"shard": number, "length": len(sample["input_ids"]), "mask_sum": len(answer)}
            rows.append(row | {"finished": sample["finished"]})
    table = provenance.read_parquet(mask)
    assert table.schema.remove_metadata() == MASK_SCHEMA
    assert table.to_pylist() == rows
    table = provenance.read_parquet(labels)
    assert table.schema.remove_metadata() == LABELS_SCHEMA
    assert table["token"].to_pylist() == sorted(counts)
    assert dict(zip(*table.to_pydict().values())) == counts


def test_equal_samples_give_equal_bytes(folder):
    paths = [shard(0, 30)[0]]
    for name, again in zip(stats(paths), stats(paths, "again")):
        assert (folder / name).read_bytes() == (folder / again).read_bytes()


def test_the_picture_is_a_png_with_the_record_and_nothing_of_its_maker(folder):
    _, _, picture = stats([shard(0, 30)[0]])
    assert provenance.read(picture) == RECORD
    chunks, data = [], (folder / picture).read_bytes()[8:]
    while data:
        length, kind = struct.unpack(">I4s", data[:8])
        assert zlib.crc32(data[4 : 8 + length]) == struct.unpack(">I", data[8 + length : 12 + length])[0]
        chunks.append((kind, data[8 : 8 + length]))
        data = data[12 + length :]
    texts = [content.split(b"\0")[0] for kind, content in chunks if kind in (b"tEXt", b"iTXt", b"zTXt", b"tIME")]
    assert texts == [b"draftline"]
    assert chunks[-1][0] == b"IEND"


def test_no_sample_at_all_is_an_empty_table_and_a_picture(folder):
    mask, labels, picture = stats([shard(0, 0)[0]])
    assert len(provenance.read_parquet(mask)) == len(provenance.read_parquet(labels)) == 0
    assert provenance.read(picture) == RECORD
