"""A live server on a loopback port, over the stub engine unless told otherwise, in a thread of the test's process."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from benchmarks.stub_engine import FOLDER, Script, StubEngine
from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.serve import Server
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.text.tokenizer import Tokenizer

MODEL = "stub"


class LiveServer:
    """A running server."""

    def __init__(self, make_backend: Callable[[], Backend], config: ServerConfig, model: str) -> None:
        self.state = ServerState(config, model)
        self.server = Server(make_backend, self.state)
        self.client = httpx.Client(timeout=240, verify=False)
        self._thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self, *, until: str) -> None:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started or self.state.phase != until:
            assert time.monotonic() < deadline, self.state.phase
            assert self._thread.is_alive(), self.server.problem
            time.sleep(0.005)
        scheme = "https" if self.state.config.ssl_certfile else "http"
        self.url = f"{scheme}://127.0.0.1:{self.server.port}"

    def stop(self) -> None:
        self.server.stop()
        self.wait()

    def wait(self, seconds: float = 30) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server does not stop"

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=json, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 if there is none."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def idle(self, seconds: float = 5) -> None:
        """Wait until nothing runs any more, neither here nor in the engine."""
        deadline = time.monotonic() + seconds
        names = ("requests_running", "requests_waiting", "http_requests_live", "kv_blocks_used", "state_slots_used")
        while values := {name: value for name in names if (value := self.metric(f"gdn_jax_{name}"))}:
            assert time.monotonic() < deadline, values
            time.sleep(0.02)


@contextlib.contextmanager
def live_server(
    make_backend: Callable[[], Backend] = StubEngine, *, model: str = MODEL, until: str = "ready", **settings: Any
) -> Iterator[LiveServer]:
    """Run a server for as long as the block."""
    found = LiveServer(make_backend, ServerConfig(port=0, **settings), model)
    found.start(until=until)
    try:
        yield found
    finally:
        if found._thread.is_alive():
            found.server.stop()
            found.server.stop()
            found.wait()
        found.client.close()


def completion(prompt: Any = "The river", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}


def chat(content: Any = "Where does the river go?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}


def events(body: str) -> list[Any]:
    """The JSON of every event of a stream, which must end in [DONE] and hold nothing else."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a streamed answer."""
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def joined(found: list[Any]) -> dict[int, str]:
    """The text of each choice of a streamed answer."""
    texts: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def texts_of(answer: dict[str, Any]) -> dict[int, str]:
    """The text of each choice of a whole answer."""
    return {
        choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    }


def spelling(text: str | bytes, *, then: int | None = None) -> Script:
    """A script that spells a text byte by byte, then ends with a token, or goes on with full stops."""
    table = {byte: number for number, byte in enumerate(_bytes_by_id())}
    ids = [table[byte] for byte in (text.encode() if isinstance(text, str) else text)]

    def script(prompt: Sequence[int], seed: int) -> Iterator[int]:
        yield from ids
        if then is not None:
            yield then
        while True:
            yield table[ord(".")]

    return script


def _bytes_by_id() -> list[int]:
    """The byte that each of the first 256 tokens of the tiny model stands for."""
    tokenizer = Tokenizer(FOLDER, 320)
    return [tokenizer.token_bytes(token)[0] for token in range(256)]
