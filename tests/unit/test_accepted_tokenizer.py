"""A tokenizer that was accepted as it is loads as before."""

import tokenizers

from draftline import provenance
from draftline.target import write_tokenizer
from draftline.tiny import build_tokenizer

RECORD = {"rule": "target", "id": "0" * 16, "settings": "1" * 16, "inputs": {}}


class Fast:
    """What `write_tokenizer` needs of transformers' tokenizer."""

    backend_tokenizer = build_tokenizer()


def test_an_accepted_tokenizer_carries_the_new_record_and_loads(tmp_path):
    path = tmp_path / "tokenizer.json"
    write_tokenizer(Fast, path, RECORD)
    before = tokenizers.Tokenizer.from_file(str(path))
    accepted = {**RECORD, "accepted": {"id": "2" * 16, "why": "renamed a variable"}}
    provenance.restamp(path, accepted)
    assert provenance.read(path) == accepted
    after = tokenizers.Tokenizer.from_file(str(path))
    assert after.encode("Name three colours.").ids == before.encode("Name three colours.").ids
