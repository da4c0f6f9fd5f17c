"""The mixer in prefill, compiled for an H200: nothing spilled, no pool copied, no part of the projections either."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile.aot import Report, compile_for_h200, spec
from flax import nnx

from gdn_jax.config import ModelConfig
from gdn_jax.gated_delta_net import GatedDeltaNet
from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, ReplayWindow
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_inputs import prefill_inputs
from gdn_jax.kernels.gdn_mixer.tiles import MOST_VALUE_HEADS, mixer_tiles
from gdn_jax.state import PrefillBatch

pytestmark = pytest.mark.compile
MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
SLOTS, LANES, BOUNDARIES = 300, 4, 8
ROW_FIELDS = ("offset", "length", "start", "read_slot", "write_slot")


def rows_of(num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe rows that may export at eight boundaries each."""
    fields = dict.fromkeys(ROW_FIELDS, spec((num_rows,), jnp.int32))
    return {**fields, "export_slot": spec((num_rows, BOUNDARIES), jnp.int32)}


def names(report: Report) -> list[str]:
    return [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in report.kernels]


def test_a_whole_layer_is_two_products_and_four_kernels_with_every_pool_in_place() -> None:
    config = ModelConfig.from_folder(MODELS / "qwen3.5-4b")
    num_tokens, num_rows, dtype = 2048, 8, jnp.bfloat16
    num_key, num_value = config.num_linear_key_heads, config.num_linear_value_heads
    width, channels = config.linear_value_dim, config.conv_channels

    def joined() -> GatedDeltaNet:
        mosaic = Implementation.MOSAIC
        layer = GatedDeltaNet(config, dtype=jnp.dtype(dtype), implementation=mosaic, rngs=nnx.Rngs(0))
        layer.join()
        return layer

    graph, shapes = nnx.split(nnx.eval_shape(joined))
    leaves, tree = jax.tree.flatten(shapes)
    gate, lanes = spec((LANES, 1, num_value), jnp.float32), (LANES, 1)
    pools = {
        "recurrent": spec((SLOTS, num_value, width, width), jnp.float32),
        "conv": spec((SLOTS, config.conv_kernel - 1, channels), dtype),
    }
    kept = {
        "k": spec((*lanes, num_key, width), dtype),
        "v": spec((*lanes, num_value, width), dtype),
        "g": gate,
        "beta": gate,
    }

    def run(leaves, x, rows, pools, raw, kept):
        layer = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        state = RecurrentState(**pools, replay=ReplayWindow(conv=raw, delta=DeltaInputs(**kept)))
        nothing = jnp.zeros((1,), jnp.int32)
        batch = PrefillBatch(token_ids=nothing, rows=PrefillRows(**rows), block_tables=nothing[None])
        y, state = layer.prefill(x, state, batch)
        return {"recurrent": state.recurrent, "conv": state.conv}, y

    described = [spec(leaf.shape, leaf.dtype) for leaf in leaves]
    x, raw = spec((num_tokens, config.hidden_size), dtype), spec((*lanes, channels), dtype)
    report = compile_for_h200(run, described, x, rows_of(num_rows), pools, raw, kept, donate=(3,))
    assert names(report) == [f"gdn_prefill_{name}" for name in ("inputs", "chunks", "states", "norm")]
    assert report.spill_bytes == 0
    assert all(kernel.stack_bytes == 0 for kernel in report.kernels)
    assert report.kernels[0].registers <= 128, "four programs of 128 threads on a multiprocessor"
    assert report.kernels[3].registers <= 128
    assert report.copies == ()
    assert report.aliased_bytes == sum(pool.size * pool.dtype.itemsize for pool in pools.values())
    # Tables of chunks and places, which all layers of a step share, take five launches more.
    assert report.launches <= 2 + 4 + 5


@pytest.mark.parametrize(
    ("num_tokens", "heads", "dtype"),
    [
        (8192, (16, 64, 128), jnp.bfloat16),
        (512, (2, 8, 128), jnp.float16),
        (64, (1, 3, 64), jnp.bfloat16),
        (8192, (16, MOST_VALUE_HEADS, 128), jnp.bfloat16),
        (8192, (1, MOST_VALUE_HEADS, 64), jnp.bfloat16),
    ],
    ids=str,
)
def test_what_comes_before_the_delta_rule_compiles_in_place(
    num_tokens: int, heads: tuple[int, int, int], dtype: jnp.dtype
) -> None:
    num_key, num_value, width = heads
    channels, num_rows = (2 * num_key + num_value) * width, 3
    columns = channels + num_value * width + 2 * num_value
    weights = {
        "taps": spec((4, channels), dtype),
        "a_log": spec((num_value,), jnp.float32),
        "dt_bias": spec((num_value,), jnp.float32),
        "norm": spec((width,), jnp.float32),
    }
    conv = spec((SLOTS, 3, channels), dtype)

    def run(packed, weights, rows, conv):
        tokens = MixerTokens(packed=packed, num_channels=channels, num_heads=num_value, width=width)
        tiles = mixer_tiles(num_tokens, num_key, num_value)
        rows = PrefillRows(**rows)
        laid, after = prefill_inputs(tokens, MixerWeights(**weights), rows, conv, num_key=num_key, tiles=tiles)
        return after, laid

    packed = spec((num_tokens, -(-columns // width) * width), dtype)
    report = compile_for_h200(run, packed, weights, rows_of(num_rows), conv, donate=(3,))
    assert names(report) == ["gdn_prefill_inputs"]
    assert report.spill_bytes == 0
    assert report.kernels[0].registers <= 168  # three programs at least share a multiprocessor
    assert report.copies == ()
    assert report.aliased_bytes == conv.size * conv.dtype.itemsize
    assert report.temporary_bytes <= 1 << 16  # the table of chunks
