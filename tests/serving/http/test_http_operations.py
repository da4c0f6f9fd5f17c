"""Running a server: starting, keys, limits, clients that leave or stall, draining, one log line per request."""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from http_rig import LiveServer, chat, completion, events, live_server

from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.core.errors import EngineError, StartupError
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.records import JsonFormatter
from gdn_jax.serving.http.serve import serve

ROOT = Path(__file__).resolve().parents[3]
SLOW = 0.01  # seconds per token of an answer that is still running when it is looked at
LONG = {"max_tokens": 4000, "ignore_eos": True}
both_ways = pytest.mark.parametrize("stream", [False, True])


def slow() -> StubEngine:
    return StubEngine(delay=SLOW)


def raw(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(content), content)


def connected(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server.port), timeout=10)


def wait_for(condition, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_while_the_model_loads_the_server_lives_and_is_not_ready() -> None:
    loaded = threading.Event()

    def make() -> StubEngine:
        loaded.wait(30)
        return StubEngine()

    with live_server(make, until="starting") as server:
        assert server.get("/health").status_code == 200
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")
        for answer in (
            server.post("/v1/completions", completion()),
            server.post("/v1/chat/completions", chat()),
            server.get("/v1/models"),
        ):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "starting"
        assert server.get("/metrics").status_code == 200
        loaded.set()
        wait_for(lambda: server.get("/ready").status_code == 200)
        assert server.post("/v1/completions", completion()).status_code == 200


def test_a_model_that_does_not_load_ends_the_server_with_its_reason() -> None:
    looked = threading.Event()

    def make() -> StubEngine:
        looked.wait(30)
        raise StartupError("no such folder")

    with live_server(make, until="starting") as server:
        looked.set()
        server.wait()
        assert isinstance(server.server.problem, StartupError)


@pytest.mark.parametrize("is_plain", [False, True], ids=["the fastest loop", "asyncio's own"])
def test_a_port_in_use_is_refused_with_the_remedy_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    def refuse() -> StubEngine:
        raise AssertionError("too early")

    if is_plain:
        monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda config: asyncio.SelectorEventLoop)
    with live_server() as server:
        port = server.server.port
        assert server.post("/v1/completions", completion()).status_code == 200
        with pytest.raises(StartupError) as caught:
            serve(refuse, ServerConfig(port=port), model="stub")
    message = f"port must be free on 127.0.0.1; {port} is in use; choose another, or 0 for any free one"
    assert str(caught.value) == message


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_is_no_address_of_the_machine_is_refused_by_name(host: str) -> None:
    with pytest.raises(StartupError, match=f"host must be an address of this machine; got '{host}'"):
        serve(StubEngine, ServerConfig(host=host, port=0), model="stub")


def test_a_port_that_only_the_system_may_take_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unprivileged(asyncio.SelectorEventLoop):
        async def create_server(self, *anything: object, **options: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda config: Unprivileged)
    with pytest.raises(StartupError, match="port must be one that this user may take; 80 is not; choose one above"):
        serve(StubEngine, ServerConfig(port=80), model="stub")


def test_a_server_that_is_told_to_stop_while_loading_does_not_wait_for_it() -> None:
    with live_server(lambda: time.sleep(6) or StubEngine(), until="starting") as server:
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5
        assert server.server.problem is None


def test_an_engine_that_dies_ends_the_server() -> None:
    engine = StubEngine()
    with live_server(lambda: engine) as server:
        engine.is_running = False
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", completion()).status_code == 503
        server.wait()
        assert isinstance(server.server.problem, EngineError)


def test_keys_are_asked_for_where_something_is_computed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("second\n\n third \n")
    with live_server(api_key=("first",), api_key_file=str(keys), allowed_origins=("https://a.example",)) as server:
        for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
            assert server.get(path).status_code == 200
        for header in (None, "Bearer wrong", "Basic first", "first", "Bearer firs", "Bearer firstt"):
            headers = {} if header is None else {"authorization": header}
            for answer in (
                server.post("/v1/completions", completion(), headers=headers),
                server.post("/tokenize", {"prompt": "a"}, headers=headers),
                server.get("/v1/models", headers=headers),
                server.get("/nothing", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second", "third"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/completions", completion(), headers=headers).status_code == 200
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type"
        answer = httpx.options(server.url + "/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        refused = server.post("/v1/completions", completion(), headers={"origin": "https://a.example"})
        assert refused.headers["access-control-allow-origin"] == "https://a.example"  # so that a page can read it


def test_the_request_id_comes_back_or_is_made(server: LiveServer) -> None:
    answer = server.post("/v1/completions", completion(), headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    made = [
        server.get("/nothing", headers={"x-request-id": given}).headers["x-request-id"] for given in ("", "a" * 999)
    ]
    assert len(set(made)) == 2
    assert all(len(one) == 32 for one in made)


def test_live_requests_may_share_a_request_id() -> None:
    with live_server(slow) as server:
        head, body = raw(completion(**LONG)).split(b"\r\n\r\n")
        connections = [connected(server) for _ in range(3)]
        for connection in connections:
            connection.sendall(head + b"\r\nx-request-id: same\r\n\r\n" + body)
        wait_for(lambda: server.metric("gdn_jax_requests_running") == 3)
        connections[0].close()
        wait_for(lambda: server.metric("gdn_jax_requests_running") == 2)
        for connection in connections:
            connection.close()
        server.idle()


def test_a_body_over_the_limit_is_refused_with_or_without_its_length() -> None:
    with live_server(max_body_mib=0.01) as server:
        large = json.dumps(completion("a" * 20_000)).encode()
        headers = {"content-type": "application/json"}
        answer = server.post("/v1/completions", content=large, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        answer = server.post("/v1/completions", content=iter([large[:9000], large[9000:]]), headers=headers)
        assert answer.status_code == 413
        assert server.post("/v1/completions", completion("a" * 3000)).status_code == 200


def test_half_a_request_is_given_up_and_blocks_nobody() -> None:
    with live_server(body_timeout=0.3) as server:
        half = raw(completion())[:-10]
        stalled, gone = connected(server), connected(server)
        stalled.sendall(half)
        gone.sendall(half)
        gone.close()
        assert server.post("/v1/completions", completion()).status_code == 200
        assert stalled.recv(4096).startswith(b"HTTP/1.1 408")
        stalled.close()
        server.idle()


def test_more_than_may_wait_get_429_and_the_rest_an_answer() -> None:
    with live_server(lambda: StubEngine(delay=SLOW, max_num_seqs=2), max_waiting=3) as server:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=30) as client:
                body = completion(max_tokens=20, ignore_eos=True)
                return await asyncio.gather(
                    *(client.post(server.url + "/v1/completions", json=body) for _ in range(20))
                )

        answers = asyncio.run(ask())
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 15
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        server.idle()


@both_ways
def test_a_request_that_takes_too_long_is_ended_and_aborted(*, stream: bool) -> None:
    with live_server(slow, request_timeout=0.3) as server:
        answer = server.post("/v1/completions", completion(stream=stream, **LONG))
        if stream:
            assert answer.status_code == 200
            last = answer.text.strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        else:
            assert answer.status_code == 504
        server.idle(1)
        assert server.post("/v1/completions", completion(max_tokens=2)).status_code == 200


@both_ways
def test_a_client_that_leaves_is_aborted_within_a_step_and_counted(*, stream: bool) -> None:
    engine = slow()
    with live_server(lambda: engine) as server:
        for _ in range(10):
            connection = connected(server)
            connection.sendall(raw(completion(n=2, stream=stream, **LONG)))
            wait_for(lambda: engine.live)
            if stream:
                connection.recv(1000)
            connection.close()
            left = time.monotonic()
            wait_for(lambda: not engine.live)
            assert time.monotonic() - left < 0.5
        server.idle(1)
        assert server.metric("gdn_jax_completions_total") == 20
        assert 'gdn_jax_completions_total{finished_reason="abort"} 20.0' in server.get("/metrics").text


def test_a_client_that_leaves_while_it_waits_for_the_engine_is_forgotten() -> None:
    with live_server(lambda: StubEngine(delay=SLOW, max_num_seqs=1)) as server:
        running, waiting = connected(server), connected(server)
        running.sendall(raw(completion(**LONG)))
        wait_for(lambda: server.metric("gdn_jax_requests_running") == 1)
        waiting.sendall(raw(completion(**LONG)))
        wait_for(lambda: server.metric("gdn_jax_requests_waiting") == 1)
        waiting.close()
        wait_for(lambda: server.metric("gdn_jax_requests_waiting") == 0)
        running.close()
        server.idle(1)


def test_a_slow_reader_gets_everything_and_holds_up_nobody(server: LiveServer) -> None:
    body = raw(completion(stream=True, logprobs=20, max_tokens=400, ignore_eos=True, n=4))
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.server.port))
    connection.sendall(body.replace(b"host: a", b"host: a\r\nconnection: close"))
    time.sleep(0.3)
    began = time.monotonic()
    assert server.post("/v1/completions", completion(max_tokens=5)).status_code == 200
    assert time.monotonic() - began < 5
    found = b""
    while part := connection.recv(1 << 20):
        found += part
    connection.close()
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert found.count(b'"finish_reason":"length"') == 4
    server.idle()


def test_a_reader_that_stalls_for_ever_is_cut_at_its_time_limit() -> None:
    with live_server(request_timeout=0.5) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.server.port))
        connection.sendall(raw(completion(stream=True, logprobs=20, n=32, max_tokens=4000, ignore_eos=True)))
        wait_for(lambda: server.metric("gdn_jax_requests_running") > 0)
        server.idle(5)
        connection.close()


@both_ways
def test_a_request_in_progress_is_finished_while_draining_and_new_ones_are_refused(*, stream: bool) -> None:
    with live_server(slow) as server:
        answers: list[httpx.Response] = []
        body = completion(stream=stream, max_tokens=50, ignore_eos=True)
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        asking.start()
        wait_for(lambda: server.metric("gdn_jax_requests_running") == 1)
        server.server.stop()
        wait_for(lambda: server.get("/ready").status_code == 503)
        assert server.get("/health").status_code == 200
        refused = server.post("/v1/completions", completion())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        asking.join()
        assert answers[0].status_code == 200
        if stream:
            assert sum(len(c["text"]) for e in events(answers[0].text) for c in e["choices"]) == 50
        server.wait()


@both_ways
def test_what_does_not_finish_in_the_time_for_draining_is_told_so(*, stream: bool) -> None:
    with live_server(slow, drain_timeout=0.2) as server:
        answers: list[httpx.Response] = []
        body = completion(stream=stream, **LONG)
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        asking.start()
        wait_for(lambda: server.metric("gdn_jax_requests_running") == 1)
        server.stop()
        asking.join()
        assert '"code":"draining"' in answers[0].text
        assert answers[0].status_code == (200 if stream else 503)


PROGRAM = """
import logging, sys
sys.path.insert(0, {root!r})
from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.serve import serve
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
serve(lambda: StubEngine(delay=0.005, max_num_seqs=4), ServerConfig(port=0), model="stub")
"""


def test_sigterm_under_load_loses_no_accepted_request() -> None:
    command = [sys.executable, "-c", PROGRAM.format(root=str(ROOT))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            if "listening" in line:
                port = int(line.split(";")[0].rpartition(":")[2])
            if line.startswith("ready"):
                break
        rest: list[str] = []
        reading = threading.Thread(target=lambda: rest.extend(process.stderr or ()))
        reading.start()

        async def load() -> list[tuple[int, str]]:
            async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=100)) as client:

                async def ask(index: int) -> tuple[int, str]:
                    body = completion(f"{index}", max_tokens=40, ignore_eos=True, stream=bool(index % 2))
                    answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                    return answer.status_code, answer.text

                asking = [asyncio.create_task(ask(index)) for index in range(40)]
                metrics = ""
                while "http_requests_live 40.0" not in metrics:
                    metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*asking)

        answers = asyncio.run(load())
        assert [status for status, _ in answers] == [200] * 40
        for index, (_, text) in enumerate(answers):
            assert (
                text.endswith("data: [DONE]\n\n") if index % 2 else json.loads(text)["usage"]["completion_tokens"] == 40
            )
        assert process.wait(10) == 0
        reading.join()
        assert not [line for line in rest if "Traceback" in line or "ERROR" in line]


def test_a_refusal_before_the_body_was_read_closes_the_connection() -> None:
    with live_server(max_body_mib=0.01, body_timeout=0.3, api_key=("key",)) as server:
        key = b"authorization: Bearer key\r\n"
        chunk = b"2710\r\n" + b"a" * 10_000 + b"\r\n"
        cases = {
            401: (b"POST /v1/completions", b"content-length: 999\r\n", b""),
            404: (b"POST /nothing", key + b"content-length: 999\r\n", b""),
            405: (b"PUT /v1/completions", key + b"content-length: 999\r\n", b""),
            408: (b"POST /v1/completions", key + b"content-length: 999\r\n", b"{"),
            413: (b"POST /v1/completions", key + b"transfer-encoding: chunked\r\n", chunk * 2),
            415: (b"POST /v1/completions", key + b"content-encoding: gzip\r\ncontent-length: 999\r\n", b""),
        }
        for status, (line, headers, body) in cases.items():
            connection = connected(server)
            connection.sendall(line + b" HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n" + body)
            answer = all_of(connection)  # ends, as the server closes
            assert answer.startswith(b"HTTP/1.1 %d" % status), answer
            assert b"connection: close" in answer
        headers = {"authorization": "Bearer key"}
        assert "connection" not in server.get("/nothing", headers=headers).headers
        assert "connection" not in server.post("/v1/completions", {"prompt": 1}, headers=headers).headers


def all_of(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    connection.close()
    return found


def test_a_body_that_is_half_sent_when_the_server_stops_gets_503(caplog) -> None:
    with live_server() as server:
        connection = connected(server)
        connection.sendall(raw(completion())[:-10])
        wait_for(lambda: server.state._readers)
        began = time.monotonic()
        with caplog.at_level(logging.INFO):
            server.stop()
        assert time.monotonic() - began < 4
        answer = all_of(connection)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"draining"' in answer
        assert "Traceback" not in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert "outcome=refused" in caplog.text


def test_a_client_that_leaves_before_its_answer_is_not_counted_as_answered() -> None:
    with live_server() as server:
        connection = connected(server)
        connection.sendall(raw(completion())[:-10])
        wait_for(lambda: server.state._readers)
        connection.close()
        wait_for(lambda: 'path="/v1/completions",status="left"} 1.0' in server.get("/metrics").text)


COMPILING = """
import logging, sys, time
sys.path.insert(0, {root!r})
from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.serve import serve
class Compiling(StubEngine):
    def shutdown(self):
        time.sleep(60)
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
serve(Compiling, ServerConfig(port=0), model="stub")
"""


def test_a_second_signal_ends_the_process_at_once_whatever_the_engine_does() -> None:
    command = [sys.executable, "-c", COMPILING.format(root=str(ROOT))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready"):
                process.send_signal(signal.SIGTERM)
            if "no new requests" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        lines += process.stderr.readlines()
    assert sum("no new requests" in line for line in lines) == 1
    assert not [line for line in lines if "Traceback" in line]


def test_https_serves_with_the_files_given() -> None:
    folder = Path(__file__).parent / "tls"
    files = {"ssl_certfile": str(folder / "certificate.pem"), "ssl_keyfile": str(folder / "key.pem")}
    with live_server(**files) as server:
        assert httpx.get(server.url + "/health", verify=False).json() == {"status": "ready"}


def test_one_log_line_says_how_a_request_ended_and_never_its_text(server: LiveServer, caplog) -> None:
    secret, name = "a very private question", "gdn_jax.serving.http.records"
    with caplog.at_level(logging.INFO, logger=name):
        headers = {"x-request-id": "line-1"}
        assert server.post("/v1/chat/completions", chat(secret, n=2), headers=headers).status_code == 200
        assert server.post("/v1/completions", completion(secret, top_p=9), headers=headers).status_code == 400
        server.get("/health")
        wait_for(lambda: len([r for r in caplog.records if r.name == name]) >= 2)
    lines = [record for record in caplog.records if record.name == name]
    assert len(lines) == 2
    done, refused = (json.loads(JsonFormatter().format(record)) for record in lines)
    assert (done["request_id"], done["status"], done["outcome"]) == ("line-1", 200, "length")
    assert done["completion_tokens"] == 32
    assert done["prompt_tokens"] > 0
    assert done["seconds"] >= done["first_token_seconds"] > 0
    assert (refused["status"], refused["outcome"]) == (400, "refused")
    assert secret not in caplog.text + json.dumps([done, refused])


def test_a_bug_is_a_500_with_a_trace_in_the_log_alone(caplog) -> None:
    class Broken(StubEngine):
        def encode(self, prompt):
            raise KeyError("something private")

    with live_server(Broken) as server:
        answer = server.post("/v1/completions", completion())
        assert answer.status_code == 500
        assert "private" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert "something private" in caplog.text
        assert answer.headers["x-request-id"] in caplog.text
        server.idle()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70_000}, "0..65535"),
        ({"max_waiting": -1}, "at least 0"),
        ({"max_body_mib": 0.0}, "above 0"),
        ({"request_timeout": float("nan")}, "at least 0"),
        ({"ssl_certfile": __file__}, "together"),
        ({"api_key_file": "/nowhere"}, "nowhere"),
        ({"api_key": ("ключ",)}, "ASCII"),
        ({"chat_template_kwargs": "[1]"}, "object"),
        ({"chat_template_kwargs": "{"}, "JSON"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_the_start(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig(**settings)
