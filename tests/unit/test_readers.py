"""Prompt files: every kind gives the same rows, and bad ones are told by path, place and cause."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from draftline.conversations import MalformedError, NoPromptError, normalized
from draftline.errors import DraftlineError
from draftline.readers import read_records

ROWS = [
    {"conversations": [{"from": "human", "value": "What is 6 × 7?"}, {"from": "gpt", "value": "42"}]},
    {"conversations": [{"from": "human", "value": "Und auf Deutsch, bitte: grüß Gott"}]},
]
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def jsonl(rows: list) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write(path: Path, rows: list) -> Path:
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(jsonl(rows)))
    return path


def values(path: Path) -> list:
    return [value for _, value in read_records(path)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    assert values(write(tmp_path / name, ROWS)) == ROWS


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_files_in_several_frames_are_read_to_their_end(tmp_path, pack):
    path = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.zst")
    path.write_bytes(pack(jsonl(ROWS[:1])) + pack(jsonl(ROWS[1:])))
    assert values(path) == ROWS


def test_byte_order_mark_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(ROWS[:1]) + b"\n  \r\n" + jsonl(ROWS[1:]))
    assert [place for place, _ in read_records(path)] == ["line 1", "line 4"]
    assert values(path) == ROWS


def test_columns_that_other_parquet_rows_have_are_no_keys_of_a_row(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "tool_calls": None}], "system": "Be brief."},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}], "system": None},
    ]
    first, second = values(write(tmp_path / "a.parquet", rows))
    assert first == {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."}
    assert second == {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"conversations": [', "not JSON"),
        (b'{"a": "gr\xfc\xdf"}', "not UTF-8 (byte 0xfc at position 9)"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b"[1, 2]", "a row must be a JSON object, not list"),
    ],
)
def test_malformed_line_is_told_with_its_number_and_cause(tmp_path, line, cause):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS) + line + b"\n" + jsonl(ROWS))
    found = list(read_records(path))
    place, error = found[2]
    assert place == "line 3"
    assert isinstance(error, MalformedError)
    assert cause in str(error)
    assert len(found) == 5


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_empty_file_is_refused_by_path(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(DraftlineError, match=f"{name}: is empty"):
        values(path)


def test_file_of_no_rows_is_refused_by_path(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.jsonl").write_text("\n\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet"
    )
    for name in ("a.json", "a.jsonl", "a.parquet"):
        with pytest.raises(DraftlineError, match=f"{name}: is empty"):
            values(tmp_path / name)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_missing_file_is_refused_by_path(tmp_path, name):
    with pytest.raises(DraftlineError, match=f"{name}: no such file"):
        values(tmp_path / name)


def test_a_folder_is_told_from_a_file(tmp_path):
    with pytest.raises(
        DraftlineError, match=rf"^{tmp_path}: is a folder; name its files, for example {tmp_path}/\*\.jsonl$"
    ):
        values(tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.xz", "a.txt", "jsonl"])
def test_unknown_extension_is_refused_with_the_known_ones(tmp_path, name):
    (tmp_path / name).write_bytes(jsonl(ROWS))
    with pytest.raises(DraftlineError, match=rf"{name}: unknown kind.*\.jsonl\.zst, \.parquet"):
        values(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_cut_file_is_refused_by_path(tmp_path, name):
    rows = [{"messages": [{"role": "user", "content": f"{n * 7919} {n * n}"}]} for n in range(5000)]
    path = write(tmp_path / name, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DraftlineError, match=rf"{name}: .*damaged or cut short"):
        values(path)


def test_json_file_that_holds_lines_is_refused_with_the_right_name(tmp_path):
    (tmp_path / "a.json").write_bytes(jsonl(ROWS))
    with pytest.raises(DraftlineError, match=r"a\.json: line 2: not JSON.*name it \.jsonl"):
        values(tmp_path / "a.json")


def test_json_file_that_is_not_utf8_is_refused_by_path(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"a": "gr\xfc\xdf"}]')
    with pytest.raises(DraftlineError, match=r"a\.json: not UTF-8"):
        values(tmp_path / "a.json")


# Conversations --------------------------------------------------------------------------------------------------------


def share_gpt(*turns: tuple[str, str], **more: object) -> dict:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def roles(record: dict) -> list[str]:
    return [message["role"] for message in normalized(record).messages]


def test_share_gpt_and_open_ai_rows_of_one_conversation_are_equal():
    ours = share_gpt(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"), ("gpt", "See you"))
    theirs = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "Hello", "tool_calls": None},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you"},
    ]
    assert normalized(ours) == normalized({"messages": theirs, "system": "Be brief."})
    assert normalized(ours) == normalized({"messages": [{"role": "system", "content": "Be brief."}, *theirs]})


@pytest.mark.parametrize(
    ("name", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("model", "assistant"),
     ("bot", "assistant"), ("tool", "tool"), ("function", "tool"), ("observation", "tool"), ("system", "system"), ("developer", "system")],
)  # fmt: skip
def test_roles_are_normalized(name, role):
    assert roles(share_gpt((name, "x"), ("human", "Hi"))) == [role, "user"]


@pytest.mark.parametrize(
    ("turns", "kept", "response"),
    [
        ("u", "u", None),
        ("ua", "u", "a1"),
        ("uaua", "uau", "a3"),
        ("uau", "uau", None),
        ("uat", "uat", None),
        ("uata", "uat", "a3"),
        ("uaa", "u", "a1"),
        ("suas", "su", "a2"),
        ("auaua", "auau", "a4"),
    ],
)
def test_conversation_is_cut_after_its_last_user_or_tool_turn(turns, kept, response):
    names = {"u": "human", "a": "gpt", "t": "tool", "s": "system"}
    conversation = normalized(share_gpt(*((names[turn], f"{turn}{n}") for n, turn in enumerate(turns))))
    assert [message["content"] for message in conversation.messages] == [f"{turn}{n}" for n, turn in enumerate(kept)]
    assert (conversation.response or {}).get("content") == response


def test_reasoning_stays_where_it_stands():
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n4", "reasoning_content": "Hm."}
    conversation = normalized({"messages": [USER, thought, USER, thought]})
    assert conversation.messages[1] == thought
    assert conversation.response == thought


def test_tool_turns_and_calls_are_kept_with_arguments_as_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": ""}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    conversation = normalized(
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer], "tools": tools}
    )
    assert conversation.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}]},
        answer,
    ]
    assert conversation.tools == tools


def test_share_gpt_function_calls_become_tool_calls():
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    record = share_gpt(("human", "Hi"), ("function_call", json.dumps(call)), ("observation", "sunny"))
    assert normalized(record).messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_tools_may_be_json_text_and_bare_functions():
    function = {"name": "weather", "description": "Tells the weather."}
    tools = [{"type": "function", "function": function}]
    assert normalized({"messages": [USER], "tools": json.dumps([function])}).tools == tools
    assert normalized({"messages": [USER], "tools": tools}).tools == tools
    assert normalized({"messages": [USER], "tools": []}).tools is None


def test_empty_system_text_is_none():
    assert roles(share_gpt(("system", ""), ("human", "Hi"), system=" ")) == ["user"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (share_gpt(("gpt", "Hello")), "no_user"),
        (share_gpt(("system", "Be brief."), ("gpt", "Hello")), "no_user"),
        (share_gpt(("tool", "sunny"), ("gpt", "Hello")), "no_user"),
        ({"messages": []}, "no_user"),
        (share_gpt(("human", " \n")), "empty"),
        (share_gpt(("human", "Hi"), ("gpt", ""), ("human", "Hm?")), "empty"),
        ({"messages": [{"role": "user", "content": None}]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "non_text"),
        ({"image": "1.jpg", **share_gpt(("human", "<image>\nWhat is this?"))}, "non_text"),
    ],
)
def test_row_that_can_be_no_prompt_says_why(record, reason):
    with pytest.raises(NoPromptError) as error:
        normalized(record)
    assert error.value.reason == reason


def test_empty_answer_at_the_end_does_not_cost_the_prompt():
    conversation = normalized(share_gpt(("human", "Hi"), ("gpt", "")))
    assert conversation.messages == [USER]
    assert conversation.response == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"text": "Hi"}, "neither conversations"),
        ({"conversations": "Hi"}, "conversations must be a list, not a string"),
        ({"messages": ["Hi"]}, "a turn must be an object, not a string"),
        (share_gpt(("narrator", "Hi")), "unknown role 'narrator'; known: system, developer, human"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content must be a string or a list of parts, not a number"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text part has no text"),
        ({"messages": [USER], "system": 7}, "system must be a string"),
        ({"messages": [{"role": "system", "content": "A"}, USER], "system": "B"}, "system differs"),
        ({"messages": [USER], "tools": "weather"}, "tools: not JSON"),
        ({"messages": [USER], "tools": {"name": "weather"}}, "tools must be a list of objects"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "an object with a name"),
        (share_gpt(("human", "Hi"), ("function_call", "weather(Rome)")), "tool_calls: not JSON"),
        ({"messages": [USER | {"name": 3}]}, "name must be a string"),
    ],
)
def test_malformed_row_says_what_is_wrong(record, cause):
    with pytest.raises(MalformedError, match=cause.replace("(", r"\(")):
        normalized(record)
