"""Time whole steps of a model with random weights: decode over a batch, prefill of a prompt and of the end of one.

    python -m benchmarks.steps
    python -m benchmarks.steps --model configs/models/qwen3.5-9b --batches 1 --profile runs/profile

`ms` is a step that waits for nothing (many are queued, the last one is waited for). The engine hands a step over before
it brings the tokens of the one before to the host (`ms one ahead`); where the next step depends on those tokens it
waits for them first (`ms with transfer`). `floor` is the time in which a copy of the same run would move what a step
must: weights once, each state read and written once, keys and values read once. With `--profile` a few more steps are
traced, and the result says what they consist of.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro

from benchmarks.kernels.device_time import check_kernels, copy_bandwidth, copy_row
from benchmarks.results_file import ResultRow, write_results
from benchmarks.trace_parts import idle_seconds, parts_of, read_events
from gdn_jax.config import ModelConfig
from gdn_jax.errors import ConfigError
from gdn_jax.joined import join_projections
from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.model import abstract_model, resolve_dtype
from gdn_jax.serving.runner.buckets import NARROW_BLOCKS
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.packed import StepInputs, pack_inputs
from gdn_jax.serving.runner.pools import DeviceState, PoolSizes, make_device_state
from gdn_jax.serving.runner.sampling import Demand, SampledRows
from gdn_jax.serving.runner.steps import advance_step, prefill_step, split_model
from gdn_jax.sizes import kv_bytes_per_token, state_bytes_per_slot, weight_bytes
from gdn_jax.state import AdvanceBatch, PrefillBatch
from gdn_jax.weights import dummy_weights

_LOG = logging.getLogger(__name__)
_PROFILED_STEPS = 3
_ROUNDS = 5  # of queued steps
_STATE_INTERVAL = 512  # the engine's default


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        model: folder with a config.json.
        output: where the results go; by default into a file of benchmarks/results/ that bears the model's name.
        batches: rows of the timed decode steps.
        context: tokens before the one that a decode step runs.
        prompts: lengths of the timed prefills.
        hits: new tokens of timed prefills whose first `cached` tokens are there already.
        cached: those tokens, a multiple of 64.
        kernels: implementation of the kernels.
        dtype: of weights and activations.
        steps: decode steps of one timing.
        profile: folder for traces, on a GPU; none is written without it.
    """

    model: Path = Path("configs/models/qwen3.5-4b")
    output: Path | None = None
    batches: tuple[int, ...] = (1, 32, 64)
    context: int = 1024
    prompts: tuple[int, ...] = (1024, 8192)
    hits: tuple[int, ...] = (32,)
    cached: int = 8192
    kernels: Literal["mosaic", "jax"] = "mosaic"
    dtype: str = "bfloat16"
    steps: int = 50
    profile: Path | None = None


class Model:
    """A model with random weights, without its MTP head, which nothing here runs."""

    def __init__(self, options: Options, config: ModelConfig) -> None:
        """Make the weights on the device."""
        self.config = replace(config, num_mtp_layers=0)
        self.dtype = resolve_dtype(options.dtype, self.config)
        self.name = f"model/{options.model.name}"
        model = dummy_weights(
            abstract_model(self.config, dtype=self.dtype, implementation=Implementation(options.kernels))
        )
        join_projections(model)
        self.static, self.params = split_model(model, num_valid_tokens=self.config.vocab_size, num_top=20)

    def sequences(self, batch: int, num_tokens: int, num_exports: int = 0) -> tuple[DeviceState, np.ndarray]:
        """Return pools for a batch of sequences and some exported states, and the sequences' block tables."""
        blocks = num_tokens // CHUNK + 1
        sizes = PoolSizes(
            num_blocks=1 + batch * blocks,
            num_slots=1 + batch + num_exports,
            num_lanes=batch,
            window=1,
            block_size=CHUNK,
            max_blocks=blocks,
            state_dtype="float32",
        )
        tables = 1 + np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
        return make_device_state(self.config, sizes, dtype=self.dtype), tables

    def decode_seconds_at(self, bandwidth: float, batch: int, context: int) -> float:
        """Return the seconds in which the least bytes of a decode step are moved."""
        state = 2 * state_bytes_per_slot(self.config, "float32", self.dtype)
        kv = context * kv_bytes_per_token(self.config, self.dtype)
        embedding = self.config.vocab_size * self.config.hidden_size * self.dtype.itemsize
        spared = 0 if self.config.tie_word_embeddings else embedding  # a few rows of it are read
        return (weight_bytes(self.config) - spared + batch * (state + kv)) / bandwidth


Step = Callable[[DeviceState], tuple[jax.Array, DeviceState]]  # to the words of the host, and the state


def decode_step(model: Model, batch: int, context: int) -> tuple[Step, DeviceState]:
    """Return a step that runs one token of each sequence, always at the same position, and the state it starts from."""
    state, tables = model.sequences(batch, context)
    slots = np.arange(1, batch + 1, dtype=np.int32)
    zeros, ones = np.zeros((batch,), np.int32), np.ones((batch,), np.int32)
    rows = AdvanceRows(
        read_slot=slots,
        write_slot=slots,
        save_slot=zeros,
        save_at=zeros,
        folded=zeros + (context - 1),
        num_replay=ones,
        num_new=ones,
    )
    ids = np.arange(batch, dtype=np.int32)[:, None]
    inputs = AdvanceBatch(token_ids=ids, rows=rows, lane=np.arange(batch, dtype=np.int32), block_tables=tables)
    return partial(_advance, model, jax.device_put(pack_inputs(inputs, _greedy(batch)))), state


def prefill_of(model: Model, num_tokens: int, cached: int = 0) -> tuple[Step, DeviceState]:
    """Return a step that runs a prompt after what is cached of it, and the state it starts from.

    States are exported as mode "all" does. Tokens and block tables are padded as far as the engine pads them at least:
    to a whole block, and to 256 blocks.
    """
    num_places = -(-num_tokens // CHUNK) * CHUNK
    boundaries = cached + np.arange(1, num_places // CHUNK + 1) * CHUNK
    is_export = (boundaries % _STATE_INTERVAL == 0) & (boundaries <= cached + num_tokens)
    exports = np.where(is_export, 1 + np.cumsum(is_export), NULL_SLOT).astype(np.int32)
    state, tables = model.sequences(1, cached + num_tokens, int(is_export.sum()))
    one = np.ones((1,), np.int32)
    rows = PrefillRows(
        offset=0 * one,
        length=num_tokens * one,
        start=cached * one,
        read_slot=one if cached else NULL_SLOT * one,
        write_slot=one,
        export_slot=exports[None],
    )
    ids = np.arange(num_places, dtype=np.int32) % model.config.vocab_size
    tables = np.pad(tables, ((0, 0), (0, max(0, NARROW_BLOCKS - tables.shape[1]))))
    inputs = PrefillBatch(token_ids=ids, rows=rows, block_tables=tables)
    return partial(
        _prefill, model, jax.device_put(pack_inputs(inputs, replace(_greedy(1), demand=Demand.ANYTHING)))
    ), state


def _advance(model: Model, inputs: StepInputs, state: DeviceState) -> tuple[jax.Array, DeviceState]:
    return advance_step(model.static, model.params, state, inputs)


def _prefill(model: Model, inputs: StepInputs, state: DeviceState) -> tuple[jax.Array, DeviceState]:
    words, _, state = prefill_step(model.static, model.params, state, inputs)
    return words, state


def _greedy(batch: int) -> SampledRows:
    return LaneSampling(batch).gather(np.arange(batch, dtype=np.int32), np.ones((batch,), np.bool_))


def benchmark(case: str, step: Step, state: DeviceState, options: Options, *, num_steps: int) -> Iterator[ResultRow]:
    """Compile a step, time it in both ways, and trace it where that is asked for."""
    began = time.perf_counter()
    words, state = step(state)
    jax.block_until_ready(words)
    row = partial(ResultRow, case=case, implementation=options.kernels, error=None)
    yield row(metric="s to compile", value=time.perf_counter() - began, unit="s")

    queued, ahead, waited = [], [], []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(num_steps):
            words, state = step(state)
        jax.block_until_ready(words)
        queued.append((time.perf_counter() - start) / num_steps)
    for _ in range(num_steps):
        start = time.perf_counter()
        following, state = step(state)
        jax.device_get(words)
        words = following
        ahead.append(time.perf_counter() - start)
    jax.block_until_ready(words)
    del words, following
    for _ in range(num_steps):
        start = time.perf_counter()
        state = _step_and_fetch(step, state)
        waited.append(time.perf_counter() - start)
    yield row(metric="ms", value=1e3 * statistics.median(queued), unit="ms")
    yield row(metric="ms one ahead", value=1e3 * statistics.median(ahead), unit="ms")
    yield row(metric="ms with transfer", value=1e3 * statistics.median(waited), unit="ms")
    if options.profile is not None:
        yield from profile(options.profile / case.replace("/", "-"), step, state, row)


def _step_and_fetch(step: Step, state: DeviceState) -> DeviceState:
    """Run a step and bring its words to the host; none of them are held when the next one begins, as in the engine.

    The compiler's command buffers name addresses: with the words of the step before still there, the new ones would lie
    elsewhere, and the host would write the buffer anew.
    """
    words, state = step(state)
    jax.device_get(words)
    return state


def profile(folder: Path, step: Step, state: DeviceState, row: Callable[..., ResultRow]) -> Iterator[ResultRow]:
    """Trace a few steps; yields the milliseconds and launches of each kind of kernel in a step, and the idle time."""
    with jax.profiler.trace(str(folder)):
        for _ in range(_PROFILED_STEPS):
            words, state = step(state)
        jax.block_until_ready(words)
    events = read_events(folder)
    for part in parts_of(events):
        kind = part.kind[:60]
        yield row(metric=f"trace: {kind}", value=1e3 * part.seconds / _PROFILED_STEPS, unit="ms")
        yield row(metric=f"launches: {kind}", value=part.count / _PROFILED_STEPS, unit="launches")
    yield row(metric="trace: idle", value=1e3 * idle_seconds(events) / _PROFILED_STEPS, unit="ms")


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    check_kernels(options.kernels, "--kernels")
    if options.profile is not None and jax.default_backend() != "gpu":
        raise SystemExit(f"--profile needs a GPU; the device here is {jax.devices()[0].device_kind}")
    try:
        config = ModelConfig.from_folder(options.model)
    except ConfigError as error:
        raise SystemExit(f"--model: {error}") from None
    bandwidth = copy_bandwidth()
    model = Model(options, config)
    rows = [copy_row(bandwidth)]
    for batch in options.batches:
        case = f"{model.name}/decode/B{batch}/ctx{options.context}"
        floor = model.decode_seconds_at(bandwidth, batch, options.context)
        rows.append(ResultRow(case=case, metric="ms", value=1e3 * floor, unit="ms", implementation="floor", error=None))
        step, state = decode_step(model, batch, options.context)
        _extend(rows, benchmark(case, step, state, options, num_steps=options.steps), options)
        del step, state
    hits = [(num_tokens, options.cached) for num_tokens in options.hits]
    for num_tokens, cached in (*((num_tokens, 0) for num_tokens in options.prompts), *hits):
        step, state = prefill_of(model, num_tokens, cached)
        case = f"{model.name}/prefill/{num_tokens}" + (f"on{cached}" if cached else "")
        _extend(rows, benchmark(case, step, state, options, num_steps=max(1, options.steps // 10)), options)
        del step, state


def _extend(rows: list[ResultRow], more: Iterator[ResultRow], options: Options) -> None:
    """Say each row, and write all of them: a run may be cut short."""
    for row in more:
        _LOG.info("%s  %s  %s: %.4g", row.case, row.implementation, row.metric, row.value)
        rows.append(row)
    output = options.output or Path("benchmarks/results") / f"steps-{options.model.name}.json"
    write_results(output, "steps", rows)


if __name__ == "__main__":
    main()
