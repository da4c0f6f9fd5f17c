"""The command line: `gdn-jax generate`, `serve`, `info`, `bench` and `train`; alone sets up logging and prints."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from itertools import chain, islice
from types import ModuleType
from typing import Annotated, TextIO

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, UseAppendAction, subcommand

from gdn_jax.errors import ModelError
from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.serving.async_llm import AsyncLLM
from gdn_jax.serving.bench.latency import Latency, measure_latency
from gdn_jax.serving.bench.report import write_json
from gdn_jax.serving.bench.throughput import Throughput, measure_throughput
from gdn_jax.serving.config import EngineConfig, SettingError
from gdn_jax.serving.core.errors import EngineError, InvalidPromptError, RequestError, StartupError
from gdn_jax.serving.engine_types import EngineStats
from gdn_jax.serving.flags import RefusedFlagError, in_flags, refusals_in_flags, settings_of
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.records import JsonFormatter
from gdn_jax.serving.http.serve import serve
from gdn_jax.serving.info import describe_model
from gdn_jax.serving.llm import LLM
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams

# What was given cannot be used: settings, parameters, files. Anything else that is no bug is a failure while running.
_MISTAKES = (SettingError, RequestError, StartupError, ModelError, UnsupportedKernelError)
_INTERRUPTED = 130  # 128 and the number of SIGINT
_READER_LEFT = 141  # 128 and the number of SIGPIPE, as shells say it
_MEMORY_SHARE = "0.95"  # of a card for JAX; the rest is for the driver, its libraries and their workspaces


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; what is left out follows the model's generation_config.json.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token.
        top_p: keep the fewest tokens whose probabilities sum to this.
        top_k: keep this many likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest.
        sampling_seed: equal seeds give equal tokens.
        stop: a string that ends the answer; may be given several times.
        ignore_eos: do not end at the model's end tokens.
    """

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    stop: UseAppendAction[tuple[str, ...]] = ()
    ignore_eos: bool = False

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the defaults with what was given on the command line, for a stream of what is new."""
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "sampling_seed"}
        changes = {name: value for name, value in given.items() if value is not None and value != ()}
        return replace(defaults, seed=self.sampling_seed, output_kind=RequestOutputKind.DELTA, **changes)


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate text, streaming it to the terminal. Answers go to standard output, everything else to standard error.

    Attributes:
        prompt: a prompt; give it several times to run several, one after the other, on one cache.
        engine: settings of the engine.
        sampling: how tokens are chosen.
        chat: treat each prompt as a user message and render the model's chat template.
        quiet: no log lines, no progress bars, no statistics.
        verbose: also one log line per step.
    """

    prompt: UseAppendAction[tuple[str, ...]]
    engine: OmitArgPrefixes[EngineConfig]
    sampling: OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    chat: bool = False
    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Info:
    """Say what a model is, what it needs, and what fits; reads config.json alone. Exit code 2: it does not fit.

    Attributes:
        model: folder with config.json, a config file, or the name of a shipped model: pico.
        memory_gib: memory of a device, for what fits.
        dtype: of weights, activations and KV: auto, bfloat16, float16 or float32.
        json: print JSON.
    """

    model: str
    memory_gib: float = 139.0
    dtype: str = "auto"
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer HTTP requests in OpenAI's form; `docs/http.md` says which.

    Attributes:
        engine: settings of the engine.
        server: settings of the server.
        quiet: only warnings, no progress bars.
        verbose: also one log line per step.
    """

    engine: OmitArgPrefixes[EngineConfig]
    server: OmitArgPrefixes[ServerConfig] = field(default_factory=ServerConfig)
    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a small model from text; needs the extra `train`. What is left out follows the config file.

    Attributes:
        config: TOML file, such as those in configs/train.
        out: folder for checkpoints, the plot and the final model.
        text: folder with train/ and held_out/; may be given several times.
        steps: of the whole run.
        time_limit_s: seconds after which the run ends with a checkpoint.
        resume: go on from the newest checkpoint in the out folder; --no-resume deletes the checkpoints there.
        quiet: only warnings, no progress bars.
        verbose: also the log lines for developers.
    """

    config: str
    out: str | None = None
    text: UseAppendAction[tuple[str, ...]] = ()
    steps: int | None = None
    time_limit_s: float | None = None
    resume: bool = True
    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the engine in this process, with the flags and results of `vllm bench`.

    Attributes:
        measure: what.
    """

    measure: OmitSubcommandPrefixes[
        OmitArgPrefixes[Annotated[Latency, subcommand("latency")] | Annotated[Throughput, subcommand("throughput")]]
    ]


_Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Info, subcommand("info")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Train, subcommand("train")]
)


class _OutputError(Exception):
    """Standard output takes no more."""


def run() -> int:
    """Run the command line; return its exit code.

    A mistake of the user's is one line and exit code 2, a failure while running one line and 1; a reader of standard
    output that left is no line and 141, as if the signal for it had ended the process. A bug is a traceback.
    """
    try:
        with refusals_in_flags():
            command = tyro.cli(_Command, prog="gdn-jax")
    except RefusedFlagError as mistake:
        sys.stderr.write(f"gdn-jax: {_one_line(mistake)}\n")
        return 2
    _let_jax_use_the_card(os.environ)
    try:
        if isinstance(command, Generate):
            return _generate(command)
        if isinstance(command, Train):
            return _train(command)
        if isinstance(command, Serve):
            _serve(command)
        elif isinstance(command, Bench):
            _bench(command.measure)
        else:
            return _info(command)
    except _MISTAKES as mistake:
        sys.stderr.write(f"gdn-jax: {in_flags(_one_line(mistake), settings_of(command))}\n")
        return 2
    except EngineError as failure:
        sys.stderr.write(f"gdn-jax: {_one_line(failure)}\n")
        return 1
    except _OutputError as failure:
        _drop_output()
        if isinstance(failure.__cause__, BrokenPipeError):
            return _READER_LEFT
        sys.stderr.write(f"gdn-jax: {_one_line(failure)}\n")
        return 1
    return 0


class _BetweenAnswers(logging.StreamHandler[TextIO]):
    """Log lines that wait while an answer streams to the same terminal."""

    _held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is None:
            super().emit(record)
        else:
            self._held.append(record)

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Hold log lines back until the block ends, which an answer's last line does too unless it is cut off."""
        if not (sys.stdout.isatty() and self.stream.isatty()):
            yield
            return
        self._held = []
        try:
            yield
        except BaseException:
            self.stream.write("\n")
            raise
        finally:
            held, self._held = self._held, None
            for record in held:
                self.handle(record)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise _OutputError(f"standard output cannot be written: {error}; send it elsewhere") from error


def _drop_output() -> None:
    """Let standard output lead nowhere: what it still holds would fail again when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _let_jax_use_the_card(environment: MutableMapping[str, str]) -> None:
    """Let JAX have nearly all of a GPU, as this process runs nothing else; it reads the variable when it first runs."""
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(environment):
        environment["XLA_CLIENT_MEM_FRACTION"] = _MEMORY_SHARE


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())


def _set_up_logging(
    command: Generate | Serve | Train | Latency | Throughput, formatter: logging.Formatter | None = None
) -> _BetweenAnswers:
    level = logging.WARNING if command.quiet else logging.DEBUG if command.verbose else logging.INFO
    handler = _BetweenAnswers(sys.stderr)
    handler.setFormatter(formatter or logging.Formatter("%(levelname).1s %(message)s"))
    ours = logging.getLogger("gdn_jax")
    ours.addHandler(handler)
    ours.setLevel(level)
    return handler


def _generate(command: Generate) -> int:
    """Return the exit code: 1 if an answer ended with an error."""
    if not command.prompt or not all(command.prompt):
        raise InvalidPromptError("a prompt must have some text; got none; give --prompt TEXT", parameter="prompt")
    log = _set_up_logging(command)
    command.sampling.params(SamplingParams())  # refused now, not when the model is loaded
    llm = LLM(command.engine.model, **command.engine.arguments(), use_tqdm=not command.quiet)
    params = command.sampling.params(llm.get_default_sampling_params())
    ends: list[str | None] = []
    for prompt in command.prompt:
        if command.chat:
            outputs = llm.stream_chat([{"role": "user", "content": prompt}], params)
        else:
            outputs = llm.stream(prompt, params)
        before = llm.stats()
        ends.append(_show(outputs, log, quiet=command.quiet))
        if command.engine.speculative_tokens and not command.quiet:
            _show_drafts(before, llm.stats())
    return int("error" in ends)


def _serve(command: Serve) -> None:
    lines = logging.Formatter("%(asctime)s %(levelname).1s %(message)s")
    handler = _set_up_logging(command, JsonFormatter() if command.server.log_json else lines)
    logging.getLogger("uvicorn").addHandler(handler)
    settings = command.engine.arguments()
    serve(
        lambda: AsyncLLM(command.engine.model, **settings, use_tqdm=not command.quiet),
        command.server,
        model=command.engine.model,
    )


def _bench(asked: Latency | Throughput) -> None:
    _set_up_logging(asked)
    report = measure_latency(asked) if isinstance(asked, Latency) else measure_throughput(asked)
    _write("".join(f"{line}\n" for line in report.lines))
    if asked.output_json is not None and report.values:
        write_json(asked.output_json, {**report.values, "command": shlex.join(["gdn-jax", *sys.argv[1:]])})


def _train(command: Train) -> int:
    """Return the exit code: 1 if the run diverged, 130 if it was interrupted (and left a checkpoint)."""
    training = _training()
    _set_up_logging(command)
    given = {item.name: getattr(command, item.name) for item in fields(command)}
    ended = training.train(given.pop("config"), **{name: given[name] for name in given if name != "verbose"})
    sys.stderr.write(f"gdn-jax: {ended.message}\n")
    return {"diverged": 1, "interrupted": _INTERRUPTED}.get(ended.reason, 0)


def _training() -> ModuleType:
    """Load what training needs, by name: an installation without the extra has not all of it."""
    try:
        return import_module("gdn_jax.training.command")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gdn_jax"):
            raise
        raise SettingError(
            f"gdn-jax train needs the extra `train`; {error.name} is not installed; in the repository, run make setup, "
            "or pip install '.[train]' for an environment of your own"
        ) from error


def _show(outputs: Iterator[RequestOutput], log: _BetweenAnswers, *, quiet: bool) -> str | None:
    """Stream one answer, say what it cost, and return why it ended."""
    num_tokens, output = 0, None
    opening = list(islice(outputs, 2))  # a prefill's and a decode's: that they are compiled is said above the answer
    with log.answer():
        for output in chain(opening, outputs):
            num_tokens += len(output.outputs[0].token_ids)
            _write(output.outputs[0].text)
        _write("\n")
    if output is None:
        return None
    if not quiet:
        sys.stderr.write(
            f"[{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them cached; "
            f"{num_tokens} generated; {output.outputs[0].finish_reason}]\n"
        )
    return output.outputs[0].finish_reason


def _show_drafts(before: EngineStats, after: EngineStats) -> None:
    """Say what drafting brought between two moments."""
    rows = after.verified_rows - before.verified_rows
    accepted, drafted = (getattr(after, name) - getattr(before, name) for name in ("accepted_tokens", "drafted_tokens"))
    if rows:
        sys.stderr.write(
            f"[{after.tokens_per_verify_since(before):.2f} tokens per verify: "
            f"{accepted} of {drafted} drafts accepted in {rows} steps]\n"
        )


def _info(command: Info) -> int:
    """Return the exit code: 2, as of a start that is refused, if the device could not serve the model."""
    report = describe_model(command.model, memory_gib=command.memory_gib, dtype=command.dtype)
    if command.json:
        _write(json.dumps(report.lines, indent=2) + "\n")
    else:
        width = max(map(len, report.lines))
        _write("".join(f"{name.replace('_', ' '):{width}}  {value}\n" for name, value in report.lines.items()))
    return 0 if report.fits else 2
