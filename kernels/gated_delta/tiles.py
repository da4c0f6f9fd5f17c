"""Tile sizes of the Mosaic kernels of the gated delta rule, and which sizes those kernels can run at all."""

from dataclasses import dataclass

import jax.numpy as jnp

from gdn_jax.kernels.dispatch import UnsupportedKernelError

WIDTHS = (64, 128)  # of keys and values
STATE_DTYPES = ("float32", "float16", "bfloat16")
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True, kw_only=True)
class AdvanceTiles:
    """How the advance is cut up.

    Attributes:
        value_rows: rows of a transposed state `[dv, dk]` in a tile, 32 or 64. Fewer rows need fewer registers and make
            more programs of a small batch; more rows share the work on keys and queries.
        lanes: that share a row, 4 or 8. With fewer, sums over keys take fewer exchanges and keys more registers.
        num_tiles: that a program owns. All are loaded at once, so that more bytes are on their way, and worked on one
            after the other.
    """

    value_rows: int
    lanes: int = 4
    num_tiles: int = 1

    def __post_init__(self) -> None:
        if self.value_rows not in (32, 64):
            raise ValueError(f"a tile must have 32 or 64 rows, 8 or 16 for each warp; got {self.value_rows}")
        if self.lanes not in (4, 8):
            raise ValueError(f"4 or 8 lanes must share a row; got {self.lanes}")

    @property
    def owned_rows(self) -> int:
        """Rows of a state that one program owns."""
        return self.num_tiles * self.value_rows


def advance_tiles(num_states: int, value_dim: int) -> AdvanceTiles:
    """Choose tiles for `num_states` states, one for each row of the batch and value head.

    With 64 rows a program takes up to 128 registers a thread, so that four of them share a multiprocessor. A batch that
    leaves some without any gets programs of half the size.
    """
    num_programs = num_states * value_dim // 64
    return AdvanceTiles(value_rows=64 if num_programs >= MULTIPROCESSORS else 32)


def check_advance(num_key: int, num_value: int, key_dim: int, value_dim: int, state_dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless the Mosaic advance can run these sizes."""
    remedy = "ask for kernels='jax', which runs any size"
    if key_dim not in WIDTHS or value_dim not in WIDTHS:
        raise UnsupportedKernelError(
            f"widths of keys and values must be 64 or 128 for Mosaic kernels; got {key_dim} and {value_dim}; {remedy}"
        )
    if num_value % num_key:
        raise UnsupportedKernelError(
            f"the number of value heads must be a multiple of that of key heads; got {num_value} and {num_key}"
        )
    name = jnp.dtype(state_dtype).name
    if name not in STATE_DTYPES:
        raise UnsupportedKernelError(
            f"states must be one of {', '.join(STATE_DTYPES)} for Mosaic kernels; got {name}; {remedy}"
        )


def check_mixer(num_key: int, num_value: int, key_dim: int, value_dim: int, state_dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless the Mosaic mixer, which the advance is part of, can run these sizes."""
    check_advance(num_key, num_value, key_dim, value_dim, state_dtype)
    if key_dim != value_dim:
        raise UnsupportedKernelError(
            f"keys and values must be of one width for the Mosaic mixer; got {key_dim} and {value_dim}; "
            "ask for kernels='jax', which runs any size"
        )
