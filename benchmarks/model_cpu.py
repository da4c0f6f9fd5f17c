"""Measure the model on a CPU: decode at two lengths of context, what is traced again, prefill.

    JAX_PLATFORMS=cpu python -m benchmarks.model_cpu

Decode runs a model of GDN layers only, since attention rightly costs more with more context; the two contexts take
turns, so that load on the machine meets both alike, and the ratio is that of the medians. Each case checks its answers
first and reports no number if they are wrong.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from safetensors.numpy import load_file

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams
from gdn_jax.config import ModelConfig
from gdn_jax.decoder import Decoder
from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.model import LanguageModel, abstract_model, load_model, single_prompt
from gdn_jax.state import AdvanceBatch, ModelState, PrefillBatch, make_state
from gdn_jax.weights import dummy_weights

_LOG = logging.getLogger(__name__)
_TINY = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny-hybrid"
_TOLERANCE = 1e-4  # float32 against float32, relative to the largest value
_CONTEXTS = (100, 4000)  # tokens before the one that a timed step runs
_GDN_ONLY = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        decode_steps: timed decode steps at each length of context.
        prefill_tokens: tokens of the timed prefill.
        prefill_runs: timed prefills.
    """

    output: Path = Path("benchmarks/results/model-cpu.json")
    decode_steps: int = 300
    prefill_tokens: int = 1024
    prefill_runs: int = 15


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def prefill(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch, state: ModelState) -> Any:
    """Return the logits of every packed token, and the state."""
    decoder = nnx.merge(graph, params).decoder
    hidden, state = decoder.prefill(batch, state)
    return decoder.logits(hidden), state


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def advance(graph: nnx.GraphDef, params: nnx.State, batch: AdvanceBatch, state: ModelState) -> Any:
    """Return the logits of every new token, and the state."""
    decoder = nnx.merge(graph, params).decoder
    hidden, state = decoder.advance(batch, state)
    return decoder.logits(hidden), state


def checked(case: str, got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest error relative to the largest expected magnitude.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    error = float(np.abs(got - want).max() / np.abs(want).max())
    if not error <= _TOLERANCE:
        raise SystemExit(f"{case}: logits must be right within {_TOLERANCE}; error {error}: no times")
    return error


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds that one call takes to its end."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def spread(case: str, seconds: list[float], error: float) -> list[ResultRow]:
    """Return median, 10th and 90th percentile in milliseconds."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    values = {"median": statistics.median(seconds), "p10": deciles[0], "p90": deciles[-1]}
    return [
        ResultRow(case=case, metric=name, value=1e3 * value, unit="ms", implementation="ours", error=error)
        for name, value in values.items()
    ]


class DecodeAtTwoContexts:
    """One sequence per length of context, in slots 1 and 2, decoded over and over at the same position.

    Slot r + 1 holds all tokens but the last, which is the replay window of lane r: a step folds it into slot 3, which
    nobody reads, and runs one new token, as plain decode does.
    """

    def __init__(self) -> None:
        config = ModelConfig.from_dict(_GDN_ONLY)
        abstract = abstract_model(config, dtype=jnp.dtype("float32"), implementation=Implementation.JAX)
        self._graph, self._params = nnx.split(dummy_weights(abstract))
        self._ids = np.random.RandomState(0).randint(0, config.vocab_size, max(_CONTEXTS) + 1)
        sizes = {"num_slots": 4, "num_pages": 1, "num_lanes": 2, "window": 1, "dtype": jnp.dtype("float32")}
        self._state = make_state(config, **sizes)
        self._wanted = self._last_logits([context + 1 for context in _CONTEXTS])
        self._last_logits([context - 1 for context in _CONTEXTS])
        for row, context in enumerate(_CONTEXTS):
            self.step(row, token=context - 1, num_replay=0)

    def _last_logits(self, lengths: list[int]) -> list[np.ndarray]:
        """Prefill a prompt per length, into slots 1 and 2; return the logits of each one's last token."""
        num_tokens = -(-(sum(_CONTEXTS) + 2) // CHUNK) * CHUNK
        packed = np.concatenate([self._ids[:length] for length in lengths])
        zero = np.zeros(2, np.int32)
        rows = PrefillRows(
            offset=np.asarray([0, lengths[0]], np.int32),
            length=np.asarray(lengths, np.int32),
            start=zero,
            read_slot=zero,
            write_slot=np.asarray([1, 2], np.int32),
            export_slot=np.zeros((2, num_tokens // CHUNK), np.int32),
        )
        token_ids = np.pad(packed, (0, num_tokens - len(packed))).astype(np.int32)
        batch = PrefillBatch(token_ids=token_ids, rows=rows, block_tables=np.zeros((2, 1), np.int32))
        logits, self._state = prefill(self._graph, self._params, batch, self._state)
        return [np.asarray(logits[end - 1]) for end in np.cumsum(lengths)]

    def step(self, row: int, *, token: int, num_replay: int = 1) -> jax.Array:
        """Run the token at one position of a row's prompt; return its logits."""

        def one(value: int) -> np.ndarray:
            return np.full((1,), value, np.int32)

        rows = AdvanceRows(
            read_slot=one(row + 1),
            write_slot=one(3),
            save_slot=one(0),
            save_at=one(0),
            folded=one(_CONTEXTS[row] - 1),
            num_replay=one(num_replay),
            num_new=one(1),
        )
        batch = AdvanceBatch(
            token_ids=self._ids[None, token : token + 1].astype(np.int32),
            rows=rows,
            lane=one(row),
            block_tables=np.zeros((1, 1), np.int32),
        )
        logits, self._state = advance(self._graph, self._params, batch, self._state)
        return logits[0, 0]

    def measure(self, repeats: int) -> list[ResultRow]:
        """Check the first step of each context, then time steps of the two in turn."""
        cases = [f"model/gdn-4x256/decode/B1/ctx{context}" for context in _CONTEXTS]
        errors = [
            checked(case, np.asarray(self.step(row, token=context)), self._wanted[row])
            for row, (case, context) in enumerate(zip(cases, _CONTEXTS, strict=True))
        ]
        # From here on the replay windows hold the same token again and again: other numbers, the same work.
        seconds: list[list[float]] = [[], []]
        for _ in range(repeats):
            for row, context in enumerate(_CONTEXTS):
                seconds[row].append(timed(partial(self.step, row, token=context)))
        ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
        return [
            *(row for args in zip(cases, seconds, errors, strict=True) for row in spread(*args)),
            ResultRow(
                case=cases[1],
                metric=f"over ctx{_CONTEXTS[0]}",
                value=ratio,
                unit="ratio",
                implementation="ours",
                error=max(errors),
            ),
        ]


@contextmanager
def counted_traces() -> Iterator[list[str]]:
    """Give a list that grows by a name whenever the decoder is traced, which is once per program compiled."""
    traced: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Decoder, name)

        def traced_call(self: Decoder, batch: Any, state: ModelState) -> Any:
            traced.append(name)
            return original(self, batch, state)

        return traced_call

    with patch.multiple(Decoder, prefill=counting("prefill"), advance=counting("advance")):
        yield traced


def traces_of_logits(model: LanguageModel, golden: dict[str, np.ndarray]) -> ResultRow:
    """Count traces over prompts of many lengths that are padded alike, the first one's included."""
    case, error = "model/tiny-hybrid/logits/65-to-130", 0.0
    with counted_traces() as traced:
        for length in range(65, 131, 5):
            logits = np.asarray(model.logits(golden["ids"][:length]))
            error = max(error, checked(case, logits, golden["logits"][:length]))
    return ResultRow(case=case, metric="traces", value=len(traced), unit="1", implementation="ours", error=error)


def traces_of_the_engine(model: LanguageModel) -> ResultRow:
    """Count traces over prompts of many lengths within a bucket, after one prompt has compiled what they need."""
    llm = LLM(str(_TINY), dtype="float32", max_model_len=512, max_num_seqs=1, use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [[length] * length for length in (1, 2, 17, 31, 32, 33, 50, 64)]
    case = "model/tiny-hybrid/engine/1-to-64"
    with counted_traces() as traced:
        llm.generate([[5] * 10], params, use_tqdm=False)
        num_first = len(traced)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    if not num_first:
        raise SystemExit(f"{case}: the first prompt must be traced, else nothing is counted; got none: no count")
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.outputs[0].token_ids[0] != int(model.logits(prompt)[-1].argmax()):
            raise SystemExit(f"{case}: the engine chooses another token after {len(prompt)} tokens: no count")
    more = len(traced) - num_first
    return ResultRow(case=case, metric="more traces", value=more, unit="1", implementation="ours", error=0.0)


def prefill_throughput(
    model: LanguageModel, golden: dict[str, np.ndarray], *, num_tokens: int, repeats: int
) -> list[ResultRow]:
    """Time whole prefills of one prompt, logits of every position included."""
    if num_tokens % CHUNK or num_tokens < len(golden["ids"]):
        raise SystemExit(
            f"--prefill-tokens must be a multiple of {CHUNK} and hold the {len(golden['ids'])} tokens that are "
            f"checked; got {num_tokens}; take 1024"
        )
    graph, params = nnx.split(model)
    ids = np.resize(golden["ids"], num_tokens)  # the prompt with recorded logits comes first
    batch = single_prompt(jnp.asarray(ids), num_tokens)
    sizes = {"num_slots": 1, "num_pages": num_tokens // CHUNK + 1, "num_lanes": 1, "window": 1, "dtype": model.dtype}
    state = make_state(model.config, **sizes)
    logits, state = prefill(graph, params, batch, state)
    case = f"model/tiny-hybrid/prefill/1x{num_tokens}"
    error = checked(case, np.asarray(logits)[: len(golden["logits"])], golden["logits"])
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        logits, state = jax.block_until_ready(prefill(graph, params, batch, state))
        seconds.append(time.perf_counter() - start)
    rate = num_tokens / statistics.median(seconds)
    return [
        *spread(case, seconds, error),
        ResultRow(case=case, metric="throughput", value=rate, unit="tokens/s", implementation="ours", error=error),
    ]


def main() -> None:
    """Run every case and write the file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    golden = load_file(_TINY / "golden.safetensors")
    model = load_model(_TINY, dtype="float32")
    rows = [
        *DecodeAtTwoContexts().measure(options.decode_steps),
        traces_of_logits(model, golden),
        traces_of_the_engine(model),
        *prefill_throughput(model, golden, num_tokens=options.prefill_tokens, repeats=options.prefill_runs),
    ]
    for row in rows:
        _LOG.info("%s  %s: %.4g %s (error %.1e)", row.case, row.metric, row.value, row.unit, row.error)
    write_results(options.output, "model-cpu", rows)


if __name__ == "__main__":
    main()
