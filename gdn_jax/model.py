"""The whole text model: decoder and MTP head; loading it from a folder; logits for those who want just those."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.config import ModelConfig
from gdn_jax.decoder import Decoder
from gdn_jax.errors import ConfigError, TokensError
from gdn_jax.kernel_sizes import check_kernel_sizes
from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation, choose_kernels
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.mtp import MTPHead
from gdn_jax.shipped import model_folder
from gdn_jax.state import PrefillBatch, make_state
from gdn_jax.weights import dummy_weights, has_mtp, load_weights

_LOG = logging.getLogger(__name__)
_DTYPES = ("bfloat16", "float16", "float32")
_LOAD_FORMATS = ("auto", "safetensors", "dummy")


class LanguageModel(nnx.Module):
    """Decoder and MTP head of one text model."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create the parameters; under `nnx.eval_shape` without memory.

        Args:
            config: the model; without MTP layers there is no head.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        parts = {"dtype": dtype, "implementation": implementation, "rngs": rngs}
        self.decoder = Decoder(config, **parts)
        self.mtp = MTPHead(config, **parts) if config.num_mtp_layers else None

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> Float[Array, "T V"]:
        """Return float32 logits at every position of one prompt, from an empty state.

        Compiled once per padded length (powers of two times a chunk); differentiable in the parameters.

        Args:
            token_ids: at least one id, each in 0..vocab_size - 1.

        Raises:
            TokensError: no ids, or one out of range.
        """
        ids = check_token_ids(token_ids, self.config.vocab_size)
        # The logits of padding are made too, so the factor is small: with four, a prompt of 300 tokens made 1,024 rows.
        padded = CHUNK
        while padded < len(ids):
            padded *= 2
        graph, params = nnx.split(self)
        # Padded on the host: there it costs no compilation for each new length. Cut on the device, so that a caller may
        # differentiate; that compiles one small slice per length.
        batch = single_prompt(jnp.asarray(np.pad(ids, (0, padded - len(ids)))), len(ids))
        return _prompt_logits(graph, params, batch)[: len(ids)]


@partial(jax.jit, static_argnums=0)
def _prompt_logits(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch) -> Float[Array, "T V"]:
    model = nnx.merge(graph, params)
    state = make_state(
        model.config,
        num_slots=1,
        num_pages=batch.block_tables.shape[1] + 1,
        num_lanes=1,
        window=1,
        dtype=model.dtype,
    )
    hidden, _ = model.decoder.prefill(batch, state)
    return model.decoder.logits(hidden)


def single_prompt(token_ids: Array, length: int) -> PrefillBatch:
    """Describe one prompt that starts at position 0, keeps no state, and owns pages 1, 2, ... in order.

    Args:
        token_ids: `[T]`, padded to a multiple of the chunk.
        length: how many of them are real.
    """
    blocks, one = token_ids.shape[0] // CHUNK, jnp.zeros((1,), jnp.int32)
    rows = PrefillRows(
        offset=one,
        length=jnp.full((1,), length, jnp.int32),
        start=one,
        read_slot=one,
        write_slot=one,
        export_slot=jnp.zeros((1, blocks), jnp.int32),
    )
    tables = jnp.arange(1, blocks + 1, dtype=jnp.int32)[None]
    return PrefillBatch(token_ids=token_ids.astype(jnp.int32), rows=rows, block_tables=tables)


def check_token_ids(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the ids as int32 `[T]`.

    Raises:
        TokensError: there are none, they are not integers, or one is outside 0..vocab_size - 1.
    """
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:  # rows of different lengths
        raise TokensError(
            f"token ids must be one non-empty sequence; got {len(token_ids)} of different lengths; pass one at a time"
        ) from error
    if ids.ndim != 1 or ids.size == 0:
        raise TokensError(f"token ids must be one non-empty sequence; got shape {ids.shape}; pass at least one id")
    if ids.dtype.kind not in "iu":
        raise TokensError(f"token ids must be integers; got dtype {ids.dtype}; convert them with int()")
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise TokensError(
            f"token ids must be in 0..{vocab_size - 1}, the model's vocabulary; got {bad[0]}; "
            "encode the text with the model's own tokenizer"
        )
    return ids.astype(np.int32)


def load_model(
    folder: str | Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    kernels: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """Load a text model from a folder in the published layout.

    Args:
        folder: holds config.json and, unless `load_format` is "dummy", safetensors weights; or the name of a shipped
            model.
        dtype: "auto" (what config.json names), "bfloat16", "float16" or "float32".
        load_format: "auto" or "safetensors" read weight files; "dummy" makes seeded random weights, no file needed.
        kernels: "auto", or an implementation by name.
        seed: of dummy weights.
        progress: called with (bytes done, bytes in all) while weights load.

    Returns:
        The model with every parameter set; nothing is kept when this raises.

    Raises:
        ConfigError: the config is missing, unreadable, or asks for something unsupported.
        WeightsError: a weight file is damaged or its tensors are not the model's.
        UnsupportedKernelError: `kernels` names an implementation that cannot run here.
    """
    folder = model_folder(folder)
    config = ModelConfig.from_folder(folder)
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(_LOAD_FORMATS)}; got {load_format!r}")
    if load_format != "dummy" and config.num_mtp_layers and not has_mtp(folder):
        config = dataclasses.replace(config, num_mtp_layers=0)
    number = resolve_dtype(dtype, config)
    choice = choose_kernels(kernels, partial(check_kernel_sizes, config, number))
    _LOG.info("kernels: %s (%s)", choice.implementation, choice.reason)
    model = abstract_model(config, dtype=number, implementation=choice.implementation)
    if load_format == "dummy":
        return dummy_weights(model, seed)
    return load_weights(model, config, folder, progress=progress)


def abstract_model(config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation) -> LanguageModel:
    """Return the model with shapes and dtypes in place of parameters."""
    return nnx.eval_shape(lambda: LanguageModel(config, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0)))


def resolve_dtype(dtype: str, config: ModelConfig) -> jnp.dtype:
    """Return the dtype that a name means for a model.

    Raises:
        ConfigError: the name is not one of "auto", "bfloat16", "float16", "float32".
    """
    name = config.dtype if dtype == "auto" else str(dtype)
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(_DTYPES)}; got {dtype!r}")
    return jnp.dtype(name)
