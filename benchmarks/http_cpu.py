"""Measure the HTTP server alone: a stub engine that emits at once, clients in another process, two cores.

    JAX_PLATFORMS=cpu python -m benchmarks.http_cpu

What the server adds to a first token is the time that a client measures minus the time to the same token without HTTP,
while as many clients as given read answers of one token every 20 ms. Rates are also given per second of the processor's
time, which other work on the machine does not change; that time includes the stub engine's. Clients are plain sockets
with a hand-written request, since a client library would cost more than the server. With `--through-engine`, also a
small model: tokens per second through HTTP over those of `LLM.generate` on the same prompts.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.results_file import ResultRow, write_results
from benchmarks.stub_engine import FOLDER, StubEngine
from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.serve import Server
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.sampling_params import SamplingParams

_PROMPT = "The river ran past the mill and under the bridge. "
_TOKENS = 128  # of a streamed answer
_PACE, _PACED_TOKENS = 0.02, 16  # seconds per token, and tokens, of the answers whose first token is timed


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        output: JSON file for the results.
        clients: how many at once.
        seconds: of each case.
        through_engine: also measure a small model, in-process and through HTTP.
        load: for the client's process: the port to load; not for people.
        case: for the client's process.
    """

    output: Path = Path("benchmarks/results/http-cpu.json")
    clients: int = 16
    seconds: float = 5.0
    through_engine: bool = False
    load: int = 0
    case: str = ""


def _body(case: str, prompt: str = _PROMPT) -> bytes:
    fields: dict[str, object] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    if case == "requests":
        fields |= {"max_tokens": 1}
    else:
        fields |= {"max_tokens": _PACED_TOKENS if case == "first-token" else _TOKENS, "stream": True}
        fields |= {"stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head.encode() % len(body) + body


async def _client(port: int, requests: Iterator[bytes], found: list[tuple[float, int]]) -> None:
    """Send requests on one connection; note of each answer the seconds to its first event and its tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in requests:
        began = time.perf_counter()
        writer.write(request)
        headers = await reader.readuntil(b"\r\n\r\n")
        if not headers.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {headers[:200]!r}")
        if b"content-length: " in headers:
            await reader.readexactly(int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            found.append((time.perf_counter() - began, 1))
            continue
        data = await reader.read(65536)
        first = time.perf_counter() - began
        while not data.endswith(b"0\r\n\r\n"):
            data = data[-512:] + await reader.read(65536)
        found.append((first, int(data.partition(b'"completion_tokens":')[2].partition(b",")[0])))
    writer.close()


def _again(request: bytes, seconds: float) -> Iterator[bytes]:
    """Yield a request until the time is up."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        yield request


async def _load(port: int, case: str, clients: int, seconds: float) -> dict[str, float]:
    async def send(requests: Iterator[bytes]) -> list[tuple[float, int]]:
        """Send requests from all clients, each taking the next one."""
        found: list[tuple[float, int]] = []
        await asyncio.gather(*(_client(port, requests, found) for _ in range(clients)))
        return found

    def requests(seconds: float) -> Iterator[bytes]:
        """Return what the clients share."""
        if case == "prompts":
            return iter([_body(case, prompt) for prompt in _prompts(clients)])
        return _again(_body(case), seconds)

    warm = await send(requests(0.5))  # what is slow only once
    began = time.perf_counter()
    found = await send(requests(seconds))
    elapsed = time.perf_counter() - began
    return {
        "requests": len(found) / elapsed,
        "tokens": sum(tokens for _, tokens in found) / elapsed,
        "num_requests": len(found) + len(warm),
        "num_tokens": sum(tokens for _, tokens in found + warm),
        "first_ms": 1000 * statistics.median(first for first, _ in found),
    }


def _prompts(clients: int) -> list[str]:
    return [f"{_PROMPT}{index}" for index in range(8 * clients)]


def _measure(make_backend: Callable[[], Backend], case: str, arguments: Arguments) -> dict[str, float]:
    """Serve in this process, load from another."""
    state = ServerState(ServerConfig(port=0, max_waiting=4096), str(FOLDER))
    server = Server(make_backend, state)
    thread = threading.Thread(target=server.run)
    thread.start()
    while state.phase != "ready":
        time.sleep(0.01)
    options = ["--load", str(server.port), "--case", case]
    options += ["--clients", str(arguments.clients), "--seconds", str(arguments.seconds)]
    command = [sys.executable, "-m", "benchmarks.http_cpu", *options]
    began = time.process_time()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = time.process_time() - began
    server.stop()
    thread.join()
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found | {"tokens_cpu": found["num_tokens"] / used, "requests_cpu": found["num_requests"] / used}


async def _first_ms_without_http(clients: int, seconds: float) -> float:
    """Return the median time to a first token of the stub engine itself, as many at once as clients."""
    engine = StubEngine(delay=_PACE)
    params = SamplingParams(temperature=0, max_tokens=_PACED_TOKENS, ignore_eos=True)
    found: list[float] = []
    until = time.perf_counter() + seconds

    async def ask(name: str) -> None:
        """Ask again and again."""
        while time.perf_counter() < until:
            began = time.perf_counter()
            times = [time.perf_counter() - began async for _ in engine.generate(engine.encode(_PROMPT), params, name)]
            found.append(times[0])

    await asyncio.gather(*(ask(str(index)) for index in range(clients)))
    return 1000 * statistics.median(found)


def _engine_rates(arguments: Arguments) -> tuple[float, float]:
    """Return tokens per second of `LLM.generate` and through HTTP, on the same small model and prompts."""
    from gdn_jax import LLM, AsyncLLM

    settings = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": arguments.clients, "use_tqdm": False}
    prompts = _prompts(arguments.clients)
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    llm = LLM(str(FOLDER), **settings)
    rates = []
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rates.append(sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began))
    del llm
    found = _measure(lambda: AsyncLLM(str(FOLDER), **settings), "prompts", arguments)
    return rates[-1], found["tokens"]


def _rows(arguments: Arguments) -> Sequence[ResultRow]:
    def row(case: str, metric: str, value: float, unit: str) -> ResultRow:
        """Make a row, and show it."""
        print(f"{case:24} {metric:28} {value:10.2f} {unit}")  # noqa: T201 - a script's output
        return ResultRow(case=case, metric=metric, value=value, unit=unit, implementation="ours", error=0.0)

    case = f"{arguments.clients} clients"
    streamed = _measure(StubEngine, "tokens", arguments)
    whole = _measure(StubEngine, "requests", arguments)
    first = _measure(lambda: StubEngine(delay=_PACE), "first-token", arguments)
    alone = asyncio.run(_first_ms_without_http(arguments.clients, arguments.seconds))
    rows = [
        row(case, "streamed tokens", streamed["tokens"], "1/s"),
        row(case, "streamed tokens", streamed["tokens_cpu"], "1/cpu-s"),
        row(case, "requests, not streamed", whole["requests"], "1/s"),
        row(case, "requests, not streamed", whole["requests_cpu"], "1/cpu-s"),
        row(case, "first token", first["first_ms"], "ms"),
        row(case, "first token without HTTP", alone, "ms"),
        row(case, "added to the first token", first["first_ms"] - alone, "ms"),
    ]
    if arguments.through_engine:
        inside, through = _engine_rates(arguments)
        rows += [
            row("small model", "tokens, LLM.generate", inside, "1/s"),
            row("small model", "tokens, through HTTP", through, "1/s"),
            row("small model", "through HTTP over inside", through / inside, "ratio"),
        ]
    return rows


def main() -> None:
    """Measure, or load a server for a measurement."""
    arguments = tyro.cli(Arguments)
    if arguments.load:
        found = asyncio.run(_load(arguments.load, arguments.case, arguments.clients, arguments.seconds))
        print(json.dumps(found))  # noqa: T201 - for the process that measures
        return
    write_results(arguments.output, "http-cpu", _rows(arguments))


if __name__ == "__main__":
    main()
