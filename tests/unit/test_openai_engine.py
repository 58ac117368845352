"""Engine `openai`: what is found out about an endpoint, and completions from a real server that knows text only."""

import json
import os

import pytest
from http_world import StatusError, World, native
from test_completions import CONFIG, ROWS, RUN, SAMPLED

from draftline import completions
from draftline.chat import Chat
from draftline.completions import COMPLETIONS_SCHEMA, complete
from draftline.engines import Request, Sampling, engine_version, open_engine, openai_engine
from draftline.engines.openai_engine import PROBE, PROBE_TOKENS
from draftline.engines.protocols import OpenAIText
from draftline.errors import DraftlineError
from transformers_serve import serving, text_only

CARD = {"id": "the-target", "max_model_len": 4096}
GREEDY = {**CONFIG, "engine": "openai"}


def pages(*cards, **more):
    return {"/health": {}, "/v1/models": {"data": list(cards) or [CARD]}, **more}


def settings(*worlds, allow=False, **entry):
    endpoints = [{"url": f"{getattr(world, 'url', world)}/v1", **entry} for world in worlds]
    return {"endpoints": endpoints, "allow_retokenize": allow, "requests": 8, "tokens": 100_000}


def vllm(body, **more):
    """A reply of a vLLM that knows return_token_ids."""
    if body["path"] != "/v1/completions":
        raise StatusError(404, "no such path")
    for name, low, high in (("min_p", 0, 1), ("top_k", -1, 10**6), ("seed", 0, 2**62)):
        if not isinstance(body[name], int | float) or not low <= body[name] <= high:
            raise StatusError(400, f"{name} is out of range")
    choice = {"text": "?", "finish_reason": "length", "stop_reason": None, "prompt_token_ids": body["prompt"]}
    return {"choices": [{**choice, "token_ids": [300] * body["max_tokens"], **more}]}


@pytest.fixture(scope="module")
def chat(tiny_target):
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


@pytest.fixture
def engine(tiny_target, chat):
    def opened(*worlds, **more):
        return open_engine("openai", tiny_target.manifest, {"engine": settings(*worlds, **more)}, chat)

    return opened


def test_a_server_that_gives_token_ids_is_asked_by_them(engine, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3cret")
    with World(vllm, pages()) as world, engine(world, api_key_env="A_KEY") as http:
        ((_, result),) = http.generate([Request("a", [5, 6], [7], 3, seed=1)], Sampling())
        assert engine_version("openai", {"engine": settings(world)}) == "unknown"
        world.pages["/version"] = {"version": "0.11.0"}
        assert engine_version("openai", {"engine": settings(world)}) == "vllm 0.11.0"
    assert (result.ids, result.finish_reason, result.retokenized) == ([300] * 3, "length", False)
    assert http.servers[0].endpoint.max_length == 4096
    probe, body = world.bodies
    assert (probe["max_tokens"], probe["temperature"]) == (PROBE_TOKENS, 0.0)
    assert (body["model"], body["prompt"], body["return_token_ids"]) == ("the-target", [5, 6, 7], True)
    assert body["stop_token_ids"] == [4059, 4057]
    assert "Bearer s3cret" in world.keys


def test_an_sglang_without_ids_in_its_openai_api_is_asked_by_its_own(engine, monkeypatch):
    lines = []
    monkeypatch.setattr(openai_engine, "say", lines.append)

    def answer(body):
        if body["path"] == "/generate":
            return native(body, [300] * body["sampling_params"]["max_new_tokens"])
        return {"choices": [{"text": "hello", "finish_reason": "length"}]}

    info = {"/server_info": {"version": "0.5.17", "enable_deterministic_inference": False}}
    with World(answer, pages(**info)) as world, engine(world) as http:
        ((_, result),) = http.generate([Request("a", [5, 6], [], 3, seed=1)], Sampling(1.0, top_k=5))
        assert engine_version("openai", {"engine": settings(world)}) == "sglang 0.5.17"
    assert any("does not heed seeds" in line for line in lines)
    assert result.ids == [300] * 3
    assert world.bodies[-1]["sampling_params"]["top_k"] == 5


@pytest.mark.parametrize(
    ("answer", "cards", "entry", "words"),
    [
        (lambda body: {"choices": [{"text": "hello"}]}, [], {}, "gives no token ids .*allow_retokenize: true"),
        (lambda body: vllm(body, prompt_token_ids=[1, 2]), [], {}, "another prompt than was sent"),
        (lambda body: vllm(body, token_ids=[99999] * 8), [], {}, "is it the target"),
        (lambda body: vllm(body, token_ids=[*body["prompt"], 5]), [], {}, "the prompt's ids in front"),
        (vllm, [CARD, {"id": "another"}], {}, "serves the-target, another; name one"),
        (vllm, [CARD], {"api_key_env": "NOT_THERE"}, "api_key_env: NOT_THERE: not in the environment"),
        (vllm, [CARD], {"api_key_env": "BROKEN_KEY"}, "api_key_env: BROKEN_KEY: holds a line break"),
    ],
)
def test_an_endpoint_that_cannot_be_the_target_is_refused_before_the_bulk(
    engine, answer, cards, entry, words, monkeypatch
):
    monkeypatch.setenv("BROKEN_KEY", "s3cret\r")
    with World(answer, pages(*cards)) as world, pytest.raises(DraftlineError, match=words), engine(world, **entry):
        pass
    assert len(world.bodies) <= 2


@pytest.mark.parametrize("page", [None, {"data": 5}, ["models"]])
def test_what_lists_no_models_is_refused_in_its_own_words(engine, page):
    listed = {} if page is None else {"/v1/models": page}
    with World(vllm, {"/health": {}, **listed}) as world:
        words = r"/v1/models: gives no list of models \(\d+, '.*'\); correct the url"
        with pytest.raises(DraftlineError, match=words), engine(world):
            pass


def test_a_parameter_that_the_server_does_not_know_does_not_pass_silently(engine):
    def answer(body):
        return vllm({**body, "min_p": 0, "seed": 0})  # Takes any value.

    request = [Request("a", [5, 6], [], 3, seed=1)]
    with World(answer, pages()) as world, engine(world) as http:
        assert len(list(http.generate(request, Sampling(1.0, top_k=5)))) == 1
        with pytest.raises(DraftlineError, match="does not know the sampling parameter min_p"):
            list(http.generate(request, Sampling(1.0, min_p=0.1)))


def test_without_any_endpoint_up_the_job_ends_at_once(engine):
    with (
        pytest.raises(DraftlineError, match=r"http://127.0.0.1:9: .*correct engine.endpoints"),
        engine("http://127.0.0.1:9"),
    ):
        pass


def test_text_is_taken_only_for_the_prompt_that_the_server_saw(chat):
    api = OpenAIText("m", chat, stop_id=4059, extended=False)
    request = Request("a", chat.prompt_ids(PROBE), [300, 301], 3, seed=1)
    body = api.body(request, Sampling(0.5, top_k=7))
    assert {"top_k", "temperature", "top_p", "seed"} <= body.keys()
    assert body.keys().isdisjoint({"min_p", "return_token_ids", "repetition_penalty"})
    assert body["prompt"] == chat.decode([*request.prompt_ids, 300, 301])
    choice = {"text": " red, blue", "finish_reason": "stop"}
    seen = len(chat.encode(body["prompt"]))
    answer = api.answer(request, {"choices": [choice], "usage": {"prompt_tokens": seen}})
    assert (answer.ids, answer.retokenized) == ([*chat.encode(" red, blue"), 4059], True)
    assert answer.prompt_ids == chat.encode(body["prompt"])
    other = api.answer(request, {"choices": [choice], "usage": {"prompt_tokens": seen + 1}})
    assert len(other.prompt_ids) == seen + 1, "a server that adds a token of its own"
    cut = {"text": " red, blu\ufffd", "finish_reason": "length"}
    answer = api.answer(request, {"choices": [cut], "usage": {"prompt_tokens": seen}})
    assert answer.ids == chat.encode(" red, blu")


@pytest.fixture(scope="module")
def server(tiny_target, tmp_path_factory):
    """A running `transformers serve` of the tiny target."""
    place = tmp_path_factory.mktemp("served")
    text_only(tiny_target.folder / "model", place / "tiny")
    with serving(place / "tiny", place / "log") as url:
        yield url


def expected(row, chat):
    """A row of engine `transformers` as it comes back through text: tokenized again, and cut at the same limit."""
    if row["finish_reason"] == "length":
        return chat.encode(chat.decode(row["completion_ids"]).rstrip("\ufffd"))[: CONFIG["max_new_tokens"]]
    ids = [*chat.encode(chat.decode(row["completion_ids"][:-1])), row["completion_ids"][-1]]
    return ids[: CONFIG["max_new_tokens"]]


def test_a_text_server_completes_as_the_target_does_but_for_the_tokens(
    server, chat, tiny_target, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = ROWS[:5]
    own = complete(rows, chat, tiny_target.manifest, CONFIG, RUN).to_pylist()
    assert {row["retokenized"] for row in own} == {False}
    allowed = {**GREEDY, "allow_retokenize": True}
    run = {"device": "cpu", "engine": settings(server, allow=True)}
    table = complete(rows, chat, tiny_target.manifest, allowed, run)
    assert table.schema == COMPLETIONS_SCHEMA
    for row, mine in zip(table.to_pylist(), own, strict=True):
        assert row["retokenized"] is True
        assert row["prompt_ids"] == mine["prompt_ids"]
        assert row["completion_ids"] == expected(mine, chat)
        assert row["attempts"] == 1
    assert completions.count_retokenized(table) == 5
    assert "5 of them retokenized" in completions.total_counts(table)

    monkeypatch.setattr(completions, "open_engine", None)
    again = complete(rows, chat, tiny_target.manifest, allowed, run)
    assert again.to_pylist() == table.to_pylist(), "finished rows are not asked for again"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    run = {"device": "cpu", "engine": settings(server, allow=False)}
    with pytest.raises(DraftlineError, match="gives no token ids"):
        complete(rows, chat, tiny_target.manifest, GREEDY, run)  # It takes no such row out of the store.


def test_a_text_server_that_lacks_a_parameter_says_so_itself(server, chat, tiny_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**SAMPLED, "engine": "openai", "allow_retokenize": True}
    run = {"device": "cpu", "engine": settings(server, allow=True)}
    with pytest.raises(DraftlineError, match=r"Unexpected fields in the request: {'top_k'}"):
        complete(ROWS[:2], chat, tiny_target.manifest, config, run)
    plain = {**config, "sampling": {**SAMPLED["sampling"], "top_k": 0}}
    statuses = [row["status"] for row in complete(ROWS[:2], chat, tiny_target.manifest, plain, run).to_pylist()]
    assert "error" not in statuses


def test_rows_stored_before_there_was_a_column_for_text_are_used(chat, tiny_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"device": "cpu", "engine": settings("http://127.0.0.1:9")}
    store = completions.RowStore(completions._answer_settings(tiny_target.manifest, GREEDY, Sampling()))
    row = ROWS[0]
    prompt_ids = chat.prompt_ids(json.loads(row["messages"]))
    store.add(row["id"], prompt_ids, completions.Row([300, 4059], "stop"))
    store.close()
    (found,) = complete([row], chat, tiny_target.manifest, GREEDY, run).to_pylist()
    assert (found["completion_ids"], found["retokenized"]) == ([300, 4059], False)
    assert os.listdir("results/.resume/rows") == [store.folder.name]
