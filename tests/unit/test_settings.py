"""Settings files hold exactly the keys of a rule, under their content's name."""

import pytest

from draftline import settings
from draftline.errors import DraftlineError
from draftline.plan import KEYS

CONFIG = {"tokens": {"keep": ["ok"]}, "drafters": {"a": {"lr": 1}, "b": {"lr": 2}}, "shards": 2}


def test_only_the_named_keys_are_cut_out():
    assert settings.cut(CONFIG, ["drafters.a.lr", "shards"]) == {"drafters": {"a": {"lr": 1}}, "shards": 2}
    assert settings.cut(CONFIG, ["missing.key"]) == {}


def test_what_is_cut_out_is_a_copy():
    settings.cut(CONFIG, ["drafters.a"])["drafters"]["a"].clear()
    assert CONFIG["drafters"]["a"] == {"lr": 1}


def test_equal_values_share_a_file_and_come_back(tmp_path):
    one = settings.write({"b": 1, "a": [1, "ü"]}, tmp_path)
    two = settings.write({"a": [1, "ü"], "b": 1}, tmp_path)
    assert one == two
    assert settings.load(one) == {"a": [1, "ü"], "b": 1}
    assert [path.name for path in tmp_path.iterdir()] == [one.name]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DraftlineError, match="no such settings file"):
        settings.load(tmp_path / "x.json")


def test_every_command_has_its_keys():
    from draftline.fingerprint import SCRIPTS

    plumbing = {"accept", "gpus", "maintenance", "planned", "preflight", "table", "unlock", "unstage"}
    assert {path.stem for path in SCRIPTS.glob("*.py")} - plumbing == set(KEYS)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path):
    path = tmp_path / "x"
    path.write_text("one")
    first = settings.file_digest(path, tmp_path / "cache")
    assert settings.file_digest(path, tmp_path / "cache") == first
    path.write_text("two!")
    assert settings.file_digest(path, tmp_path / "cache") != first


@pytest.mark.parametrize("left", ["", "ab12"])
def test_a_digest_that_a_kill_left_half_written_is_made_again(tmp_path, left):
    path = tmp_path / "x"
    path.write_text("one")
    digest = settings.file_digest(path, tmp_path / "cache")
    (known,) = (tmp_path / "cache").iterdir()
    known.write_text(left)
    assert settings.file_digest(path, tmp_path / "cache") == digest
    assert known.read_text() == digest
