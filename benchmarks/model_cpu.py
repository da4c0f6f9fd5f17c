"""Measure the model on a CPU: decode cost against context, and what compiles.

    JAX_PLATFORMS=cpu python -m benchmarks.model_cpu

The decode case has GDN layers alone, so attention does not count: a state has one size, whatever it has absorbed.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams
from gdn_jax.config import ModelConfig
from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel
from gdn_jax.serving.runner.steps import advance_step, prefill_step
from gdn_jax.state import AdvanceBatch, make_state

_ROOT = Path(__file__).resolve().parents[1]
_CONTEXTS = (100, 4000)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        repeats: timed rounds; the median counts.
    """

    output: Path = Path("benchmarks/results/model-cpu.json")
    repeats: int = 15


def _gdn_only() -> LanguageModel:
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 512,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "intermediate_size": 512,
            "mtp_num_hidden_layers": 0,
        }
    )
    return LanguageModel(config, dtype=jnp.dtype("float32"), implementation=Implementation.JAX, rngs=nnx.Rngs(0))


def _row_at(context: int) -> AdvanceBatch:
    def one(value: int) -> jax.Array:
        return jnp.full((1,), value, jnp.int32)

    rows = AdvanceRows(
        read_slot=one(1),
        write_slot=one(1),
        save_slot=one(0),
        save_at=one(0),
        folded=one(context),
        num_replay=one(1),
        num_new=one(1),
    )
    return AdvanceBatch(token_ids=one(7)[:, None], rows=rows, lane=one(0), block_tables=jnp.ones((1, 64), jnp.int32))


@partial(jax.jit, static_argnums=0)
def _decode(graph: Any, params: Any, batch: AdvanceBatch, state: Any) -> Any:
    model = nnx.merge(graph, params)
    hidden, state = model.decoder.advance(batch, state)
    return model.decoder.logits(hidden), state


def decode_against_context(repeats: int) -> list[ResultRow]:
    """Time per decoded token at 4,000 tokens of context as a share of that at 100, rounds taking turns."""
    model = _gdn_only()
    graph, params = nnx.split(model)
    state = make_state(model.config, num_slots=2, num_pages=2, num_lanes=1, window=1, dtype=model.dtype)
    seconds: dict[int, list[float]] = {context: [] for context in _CONTEXTS}
    for turn in range(repeats + 1):  # the first compiles
        for context in _CONTEXTS:
            batch, logits = _row_at(context), None
            began = time.perf_counter()
            for _ in range(20):
                logits, state = _decode(graph, params, batch, state)
            if not np.isfinite(np.asarray(logits)).all():
                raise SystemExit("the logits are not finite")
            if turn:
                seconds[context].append(time.perf_counter() - began)
    short, long = (statistics.median(seconds[context]) for context in _CONTEXTS)
    return [_row("decode/gdn-only/ctx4000-over-ctx100", "ratio", long / short, "1")]


def compiled_steps() -> list[ResultRow]:
    """How many steps eight prompt lengths within one bucket compile beyond the first."""
    llm = LLM(
        str(_ROOT / "tests" / "golden" / "tiny-hybrid"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        use_tqdm=False,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[5] * 10], params, use_tqdm=False)
    before = prefill_step._cache_size() + advance_step._cache_size()
    for length in (1, 2, 17, 31, 32, 33, 50, 64):
        llm.generate([[length] * length], params, use_tqdm=False)
    after = prefill_step._cache_size() + advance_step._cache_size()
    return [_row("compiled/8-lengths-in-one-bucket", "steps", after - before, "1")]


def _row(case: str, metric: str, value: float, unit: str) -> ResultRow:
    return ResultRow(case=case, metric=metric, value=value, unit=unit, implementation="ours", error=None)


def main(options: Options) -> None:
    """Run every case and write the file."""
    rows = [*decode_against_context(options.repeats), *compiled_steps()]
    write_results(options.output, "model-cpu", rows)
    for row in rows:
        sys.stdout.write(f"{row.case:40} {row.metric:8} {row.value:.4g}\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
