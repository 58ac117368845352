"""The client of engines over HTTP, against real servers on loopback that fail in every way they can."""

import json
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter

import pytest
from http_world import STOP, VOCABULARY, DropError, StatusError, Wire, World, hear, native, reply

from draftline.engines import Request, Sampling, client
from draftline.engines.answers import (
    AFTER_STOP,
    CUT_SHORT,
    NO_STOP,
    OTHER_PROMPT,
    OUTSIDE,
    STOP_LEFT_OUT,
    TOO_MANY,
    UNKNOWN,
    Checks,
    RefusedError,
)
from draftline.engines.client import Endpoint, HttpEngine, Limits
from draftline.engines.protocols import Answer, OpenAITokens, SGLangGenerate
from draftline.errors import DraftlineError

PROMPT = list(range(100, 112))


@pytest.fixture
def said(monkeypatch):
    """Lines that the client says."""
    lines = []
    monkeypatch.setattr(client, "say", lines.append)
    return lines


def requests(count, new=4, prompt=PROMPT):
    return [Request(f"{n:03d}", prompt, [], new, seed=n) for n in range(count)]


def engine(*worlds, watch=None, key=None, **limits):
    endpoints = [Endpoint(getattr(world, "url", world), SGLangGenerate(), key) for world in worlds]
    return HttpEngine(endpoints, Checks([STOP], VOCABULARY), Limits(**limits), watch)


def run(http, asked):
    with http:
        return list(http.generate(asked, Sampling()))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reasons(found):
    return {result.error for _, result in found if result.finish_reason == "error"}


def test_every_request_is_answered_once_and_the_longest_go_first():
    asked = [Request(f"{n:02d}", PROMPT[: 1 + n % 3], [7] * (n % 2), 1 + n % 7, seed=n) for n in range(40)]
    with World() as world:
        found = run(engine(world, requests=1), asked)
    assert sorted(request.id for request, _ in found) == [request.id for request in asked]
    for request, result in found:
        assert (result.ids, result.finish_reason) == (list(range(10, 10 + request.max_new_tokens)), "length")
        assert result.seconds > 0
    costs = [len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] for body in world.bodies]
    assert costs == sorted(costs, reverse=True)
    assert {tuple(body["input_ids"]) for body in world.bodies} == {(*r.prompt_ids, *r.sampled_ids) for r in asked}


def test_as_many_requests_are_in_flight_as_wanted_and_no_more():
    together = threading.Barrier(120, timeout=60)

    def answer(body):
        together.wait()  # Passes once 120 are here at the same time.
        return native(body)

    with World(answer) as world:
        assert not reasons(run(engine(world, requests=120), requests(240)))
    assert world.most == 120


def test_tokens_in_flight_are_bounded_and_a_request_over_the_bound_goes_alone():
    def answer(body):
        time.sleep(0.01)
        return native(body)

    asked = [*requests(30, new=8), Request("long", PROMPT, [], 70, seed=0)]
    with World(answer) as world:
        assert len(run(engine(world, requests=100, tokens=3 * 20), asked)) == 31
    assert world.most_tokens == len(PROMPT) + 70, "the long one, alone"
    assert world.bodies[0]["sampling_params"]["max_new_tokens"] == 70
    assert world.most <= 3


@pytest.mark.parametrize(
    "failure",
    [
        StatusError(500, "oops"),
        StatusError(503, "loading"),
        DropError(),
        StatusError(429, headers={"Retry-After": "0.2"}),
    ],
)
def test_a_request_that_fails_in_passing_is_asked_again(failure, said):
    seen = Counter()

    def answer(body):
        seed = body["sampling_params"]["sampling_seed"]
        seen[seed] += 1
        if seed == 3 and seen[seed] == 1:
            raise failure
        return native(body)

    with World(answer) as world:
        found = run(engine(world, requests=2), requests(8))
    assert not reasons(found)
    assert len(found) == 8
    assert seen[3] == 2
    left_out = [line for line in said if "left out" in line]
    assert len(left_out) == (isinstance(failure, StatusError) and failure.code == 503), (
        "one failure is not enough, 503 is"
    )


def test_a_request_that_always_fails_ends_as_an_error_with_the_reason(said):
    def answer(body):
        if body["sampling_params"]["sampling_seed"] == 3:
            raise StatusError(500, "a shape that I cannot")
        return native(body)

    with World(answer) as world:
        found = run(engine(world), requests(8))
    ((request, result),) = [(request, result) for request, result in found if result.finish_reason == "error"]
    assert (request.id, len(found)) == ("003", 8)
    assert "500" in result.error
    assert "a shape that I cannot" in result.error


def test_an_endpoint_that_is_gone_is_left_out_and_said_once(said):
    gone = f"http://127.0.0.1:{free_port()}"
    with World() as world:
        found = run(engine(gone, world, requests=4), requests(40))
    assert not reasons(found)
    assert len(found) == 40
    assert len([line for line in said if "left out" in line]) == 1
    assert gone in said[0]


def test_an_endpoint_that_comes_back_is_used_again(monkeypatch):
    port, opened = free_port(), []

    def heard(line):
        if "left out" in line:
            opened.append(World(port=port).__enter__())
        elif "is back" in line:
            opened.append(line)

    monkeypatch.setattr(client, "say", heard)
    found = run(engine(f"http://127.0.0.1:{port}"), requests(5))
    opened[0].__exit__()
    assert not reasons(found)
    assert "is back" in opened[1]
    assert len(opened[0].bodies) == 5


def test_with_no_endpoint_up_for_long_requests_end_as_errors(said):
    found = run(engine(f"http://127.0.0.1:{free_port()}", down_seconds=0.5), requests(3))
    assert len(found) == 3
    assert all(result.finish_reason == "error" for _, result in found)


def test_an_endpoint_that_stands_still_is_left_out_and_its_requests_go_elsewhere(said, monkeypatch):
    monkeypatch.setattr(client, "LEAST_RATE", 1000.0)
    over = threading.Event()

    def hang(body):
        if said:  # It stands still only once: no request loses all its tries there.
            return native(body)
        over.wait(60)
        raise DropError

    pages = {}  # No health to ask for: it is taken at its word.
    with World(hang, pages) as hung, World() as world:
        found = run(engine(hung, world, requests=4, stall_seconds=0.5), requests(30))
        over.set()
    assert not reasons(found)
    assert len(found) == 30
    assert any(hung.url in line and "no answer for" in line for line in said)


def test_a_silent_endpoint_that_fails_its_health_is_left_out(said, monkeypatch):
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(client, "HEALTH_SECONDS", 0.5)
    over = threading.Event()

    def hang(body):
        over.wait(60)
        raise DropError

    with World(hang) as hung, World() as world:
        hung._server.shutdown()  # Connections are accepted, by the kernel, and nobody answers.
        found = run(engine(hung, world, requests=4), requests(30))
        over.set()
        threading.Thread(target=hung._server.serve_forever, daemon=True).start()
    assert not reasons(found)
    assert any(hung.url in line and "/health" in line for line in said)


def test_a_fast_endpoint_gets_more_than_a_slow_one():
    def slowly(body):
        time.sleep(0.3)
        return native(body)

    with World(slowly) as slow, World() as fast, engine(slow, fast, requests=100) as http:
        assert len(list(http.generate(requests(20), Sampling()))) == 20
        measured = len(slow.bodies)
        assert len(list(http.generate(requests(40), Sampling()))) == 40
    assert len(slow.bodies) - measured < 20, "there was room for all at both; their rates decided"
    assert len(slow.bodies) + len(fast.bodies) == 60


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_what_no_other_try_will_change_ends_the_job_in_the_servers_words(code):
    def answer(body):
        raise StatusError(code, "no model s3cret-key here")

    with World(answer) as world, pytest.raises(DraftlineError) as error:
        run(engine(world, key="s3cret-key"), requests(3))
    assert f"{world.url}/generate: {code} " in str(error.value)
    assert "no model *** here" in str(error.value)
    assert world.keys == {"Bearer s3cret-key"}
    assert "s3cret-key" not in repr(Endpoint(world.url, key="s3cret-key"))


def test_a_busy_server_is_not_left_out_and_gives_its_requests_back_in_the_end(said):
    def answer(body):
        raise StatusError(429, headers={"Retry-After": "0.1"})

    with World(answer) as world:
        found = run(engine(world, stall_seconds=0.5), requests(2))
    assert {"busy (429)" in reason for reason in reasons(found)} == {True}
    assert len([line for line in said if "is busy" in line]) == 1
    assert not [line for line in said if "left out" in line]


def test_an_aborted_answer_is_asked_again_and_never_given_as_finished():
    seen = Counter()

    def answer(body):
        seed = body["sampling_params"]["sampling_seed"]
        seen[seed] += 1
        if seed == 1 or (seed == 2 and seen[seed] == 1):
            return native(body, [10], type="abort", message="aborted")
        return native(body)

    with World(answer) as world:
        http = engine(world)
        found = {request.id: result for request, result in run(http, requests(4))}
    assert [found[f"{n:03d}"].finish_reason for n in range(4)] == ["length", "error", "length", "length"]
    assert "abort" in found["001"].error
    assert (seen[1], seen[2]) == (client.TRIES, 2)
    assert http.checks.counts == {"finish reason abort": 4}


def test_a_server_that_returns_the_prompt_as_well_fails_the_engine():
    with World(lambda body: native(body, [*body["input_ids"], 10, 11])) as world:
        with pytest.raises(DraftlineError, match=r"returns the prompt's ids in front of the sampled ones") as error:
            run(engine(world), requests(3))
        assert world.url in str(error.value)


def test_more_than_a_fifth_of_bad_answers_at_the_beginning_ends_the_job_by_kind():
    def answer(body):
        return native(body, [VOCABULARY + 5] * 4) if body["sampling_params"]["sampling_seed"] % 4 == 0 else native(body)

    with World(answer) as world, pytest.raises(DraftlineError, match=rf"\d+ x {OUTSIDE}"):
        run(engine(world), requests(100))


def test_fewer_bad_answers_are_error_rows():
    def answer(body):
        return native(body, [VOCABULARY + 5] * 4) if body["sampling_params"]["sampling_seed"] % 8 == 0 else native(body)

    with World(answer) as world:
        found = run(engine(world), requests(100))
    assert Counter(result.finish_reason for _, result in found) == {"error": 13, "length": 87}
    (reason,) = reasons(found)
    assert OUTSIDE in reason


def judged(answer, sampled=()):
    checks = Checks([STOP, 3], VOCABULARY)
    checks.asked = 1
    result = checks.result(Request("a", PROMPT, sampled, 4, seed=0), answer, "http://there")
    return (result.ids, result.finish_reason, *checks.counts)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (Answer([10, 11, STOP], "stop", STOP), ([10, 11, STOP], "stop")),
        (Answer([10, 11, STOP, 12, 13, 14], "stop", STOP), ([10, 11, STOP], "stop", AFTER_STOP)),
        (Answer([10, STOP, 11, 12], "length"), ([10, STOP], "stop", AFTER_STOP)),
        (Answer([10, 3, STOP, 3], "stop", STOP), ([10, 3], "stop", AFTER_STOP)),
        (Answer([10, 11, 12, 13], "length"), ([10, 11, 12, 13], "length")),
        (Answer([10, 11, 12, 13, 14], "length"), ([10, 11, 12, 13], "length", TOO_MANY)),
        (Answer([10, 11, 12, 13, STOP], "stop", STOP), ([10, 11, 12, 13], "length", TOO_MANY)),
        (Answer([10, 11], "stop", 3), ([10, 11, 3], "stop", STOP_LEFT_OUT)),
        (Answer([], "stop", 3), ([3], "stop", STOP_LEFT_OUT)),
        (Answer([10, 11], "length", retokenized=True), ([10, 11], "length")),
        (Answer([10, STOP], "stop", prompt_ids=PROMPT), ([10, STOP], "stop")),
    ],
)
def test_an_answer_becomes_a_result(answer, wanted):
    assert judged(answer) == wanted


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer([10, 11], "stop"), NO_STOP),
        (Answer([10, 11], "stop", 9), NO_STOP),
        (Answer([10, 11], "length"), CUT_SHORT),
        (Answer([10, VOCABULARY, STOP], "stop"), OUTSIDE),
        (Answer([10, -1, STOP], "stop"), OUTSIDE),
        (Answer([10, 11, STOP], "content_filter"), UNKNOWN),
        (Answer([10, STOP], "stop", prompt_ids=PROMPT[1:]), OTHER_PROMPT),
        (Answer([], "length"), "no ids"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_by_its_kind(answer, kind):
    with pytest.raises(RefusedError) as refused:
        judged(answer)
    assert refused.value.kind == kind


def test_all_sampling_parameters_are_sent_and_sampled_ids_go_behind_the_prompt():
    request = Request("a", [5, 6], [7], 9, seed=2**62 + 1)
    sampling = Sampling(0.7, 0.9, 20, 0.05)
    body = SGLangGenerate((2, 3)).body(request, sampling)
    assert body["input_ids"] == [5, 6, 7]
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.0}
    penalties = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
        "stop_token_ids": [2, 3],
    }
    own = {"max_new_tokens": 9, "sampling_seed": 2**62 + 1}
    assert body["sampling_params"] == {**drawn, **penalties, **own}
    body = OpenAITokens("m", (2, 3)).body(request, sampling)
    seed = body.pop("seed")
    assert body == {
        **drawn,
        **penalties,
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "return_token_ids": True,
    }
    other = OpenAITokens("m").body(Request("a", [5, 6], [], 9, seed=2**62 + 1), sampling)["seed"]
    assert 0 <= seed < 2**31
    assert seed != other, "a row that goes on does not draw the numbers of its beginning again"
    greedy = OpenAITokens("m").body(request, Sampling(0.0, 0.9, 20, 0.05))
    assert [greedy[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [0.0, 1.0, -1, 0.0]


@pytest.mark.parametrize("answer", [lambda body: {"text": "hello"}, lambda body: native(body, [10, 11, True, 12])])
def test_a_reply_of_another_protocol_is_an_error_with_its_path(said, answer):
    with World(answer) as world:
        (reason,) = reasons(run(engine(world, down_seconds=0.5), requests(1)))
    assert f"{world.url}/generate: not a reply of this protocol" in reason


def test_leaving_early_ends_what_is_in_flight():
    over = threading.Event()

    def answer(body):
        if body["sampling_params"]["sampling_seed"]:
            over.wait(60)
        return native(body)

    with World(answer) as world, engine(world, requests=3) as http:
        results = http.generate(requests(50), Sampling())
        assert next(results)[0].id == "000"
        results.close()
        assert not http.servers[0].flying
        assert len(list(http.generate(requests(1), Sampling()))) == 1
        over.set()
    assert len(world.bodies) <= 1 + 3 + 1, "the first, three in flight, and the later one"


def test_a_watch_that_raises_ends_the_engine():
    over = threading.Event()

    def hang(body):
        over.wait(60)
        raise DropError

    def watch():
        raise DraftlineError("the server has ended")

    with World(hang) as world:
        with pytest.raises(DraftlineError, match="the server has ended"):
            run(engine(world, watch=watch), requests(3))
        over.set()


def test_more_tokens_than_the_server_takes_are_refused_before_anything_is_sent():
    with World() as world:
        http = HttpEngine([Endpoint(world.url, SGLangGenerate(), max_length=15)], Checks([STOP], VOCABULARY))
        with pytest.raises(DraftlineError, match="serves 15 tokens at most, but prompt and answer may have 16"):
            run(http, requests(1))
    assert not world.bodies


# What goes over the wire ------------------------------------------------------------------------------------------------


def test_a_kept_connection_that_the_server_ends_unread_costs_no_try(said, monkeypatch):
    monkeypatch.setattr(client, "TRIES", 1)
    connections, together = [], threading.Barrier(2, timeout=60)

    def talk(connection):
        connections.append(connection)
        if len(connections) <= 2:
            together.wait()
        connection.sendall(reply(json.dumps(native(hear(connection))).encode()))
        connection.recv(1, socket.MSG_PEEK)  # The next request is there, and stays unread.

    with Wire(talk) as wire, engine(wire) as http:
        found = list(http.generate(requests(2), Sampling()))
        found += http.generate(requests(1), Sampling())  # It may take one or the other of two that are kept.
    assert not reasons(found)
    assert len(found) == len(connections) == 3
    assert not said


def test_a_request_whose_connection_ends_each_time_is_sent_twice_a_try(said):
    def answer(body):
        if body["sampling_params"]["sampling_seed"] == 0:
            raise DropError
        return native(body)

    with World(answer) as world:
        found = run(engine(world, requests=1), requests(4))
    assert [result.finish_reason for _, result in found].count("error") == 1
    assert "Server disconnected" in reasons(found).pop()
    sent = Counter(body["sampling_params"]["sampling_seed"] for body in world.bodies)
    assert sent == {0: 2 * client.TRIES, 1: 1, 2: 1, 3: 1}


def test_a_request_given_up_ends_its_connection_so_that_the_server_can_abort_it():
    ended = threading.Semaphore(0)

    def talk(connection):
        if hear(connection)["sampling_params"]["sampling_seed"]:
            connection.recv(1)
            ended.release()
        else:
            connection.sendall(reply(json.dumps(native({"sampling_params": {"max_new_tokens": 4}})).encode()))
            connection.recv(1)

    with Wire(talk) as wire, engine(wire, requests=3) as http:
        results = http.generate(requests(3), Sampling())
        assert next(results)[0].id == "000"
        results.close()
        for _ in range(2):
            assert ended.acquire(timeout=60)


def test_prompts_and_answers_of_many_megabytes_go_through():
    asked = requests(2, new=300_000, prompt=list(range(100, 900)) * 500)
    with World(lambda body: native(body, [11] * 300_000)) as world:
        found = run(engine(world), asked)
    assert {len(result.ids) for _, result in found} == {300_000}
    assert {len(body["input_ids"]) for body in world.bodies} == {400_000}


def test_a_server_that_does_not_take_a_request_has_failed(said, monkeypatch):
    monkeypatch.setattr(client, "WRITE_SECONDS", 0.3)
    over = threading.Event()
    with Wire(lambda connection: over.wait(60)) as wire:
        found = run(engine(wire, down_seconds=0.5), requests(1, prompt=[123456] * 2_000_000))
        over.set()
    assert reasons(found) == {f"{wire.url}: TimeoutError"}


def test_a_server_that_takes_no_connection_is_left_out(said, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, World() as world:
        place = listener.getsockname()
        for filler in (fillers := [socket.socket() for _ in range(4)]):
            filler.setblocking(False)
            filler.connect_ex(place)
        full = f"http://127.0.0.1:{place[1]}"
        found = run(engine(full, world, requests=2), requests(8))
        for filler in fillers:
            filler.close()
    assert not reasons(found)
    assert any(f"{full} is left out" in line and "timeout" in line.lower() for line in said)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("400 Bad Request", "<h1>No such model</h1> \ufffd ***"),
        ("200 OK", "a reply that is no JSON ('<h1>No such model"),
    ],
)
def test_what_is_no_json_is_told_as_it_is(said, status, words):
    def talk(connection):
        while hear(connection):
            connection.sendall(reply(b"<h1>No such\r\nmodel</h1>\t\xff s3cret", status, "Content-Type: text/html"))

    with Wire(talk) as wire:
        try:
            (told,) = reasons(run(engine(wire, key="s3cret", down_seconds=0.5), requests(1)))
        except DraftlineError as error:
            told = str(error)
    assert words in told
    assert "s3cret" not in told


def test_a_redirect_is_not_followed():
    with World() as other:

        def talk(connection):
            hear(connection)
            connection.sendall(reply(b"over there", "307 Temporary Redirect", f"Location: {other.url}/generate"))

        with Wire(talk) as wire, pytest.raises(DraftlineError, match="307 over there"):
            run(engine(wire, key="s3cret"), requests(1))
    assert not other.bodies


def test_the_environments_proxy_is_for_other_hosts_only(monkeypatch):
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with World() as proxy, World() as here:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "near.invalid")
        assert not reasons(run(engine("http://far.invalid:81", key="k"), requests(2)))
        assert not reasons(run(engine(here), requests(2)))
        assert "near.invalid" in reasons(run(engine("http://near.invalid", down_seconds=0.3), requests(1))).pop()
    assert [body["path"] for body in proxy.bodies] == ["http://far.invalid:81/generate"] * 2
    assert proxy.keys == {"Bearer k"}
    monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
    assert client._proxy("http://far.invalid:81") == proxy.url
    monkeypatch.delenv("http_proxy")
    monkeypatch.setenv("ALL_PROXY", "socks5://user:word@127.0.0.1:9")
    with pytest.raises(DraftlineError, match=r"names a proxy of kind socks5 for it.*no_proxy to far.invalid"):
        run(engine("http://far.invalid"), requests(1))


def test_certificates_are_those_that_the_environment_names(tmp_path, monkeypatch, said):
    own = tmp_path / "own.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", own, "-out", tmp_path / "cert.pem"]
    try:
        subprocess.run(
            [*make, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed: there is no certificate to test with")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert.pem", own)

    def talk(connection):
        with server.wrap_socket(connection, server_side=True) as safe:
            while True:
                safe.sendall(reply(json.dumps(native(hear(safe))).encode()))

    try:
        with Wire(talk) as wire:
            url = wire.url.replace("http", "https")
            assert "CERTIFICATE_VERIFY_FAILED" in reasons(run(engine(url, down_seconds=0.3), requests(1))).pop()
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            client._certificates.cache_clear()
            assert not reasons(run(engine(url), requests(4)))
    finally:
        client._certificates.cache_clear()
