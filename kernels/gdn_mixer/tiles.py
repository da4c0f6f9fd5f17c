"""How the mixer's Mosaic prefill is cut up, which changes no bit of what is computed, and what it cannot run."""

from dataclasses import dataclass

from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.gated_delta.tiles import MULTIPROCESSORS
from gdn_jax.kernels.numerics import CHUNK

MOST_TAPS = 9  # of a convolution: shared memory has room for the inputs of so many before a tile
# Shared memory has room for b and a of so many, of a chunk's tokens and as many rows before them.
MOST_VALUE_HEADS = 448
_PROGRAMS = 3 * MULTIPROCESSORS // 2  # fewer leave multiprocessors idle


@dataclass(frozen=True, kw_only=True)
class MixerTiles:
    """What a program of the kernel before the delta rule does.

    Attributes:
        heads: of q, of k or of v, 1 or 2.
        places: of a chunk, that it fills: CHUNK or a part of it. Fewer make more programs, each of which reads the
            window before its first token again.
    """

    heads: int
    places: int

    def __post_init__(self) -> None:
        if self.heads not in (1, 2):
            raise ValueError(f"a program must have 1 or 2 heads; got {self.heads}")
        if self.places not in (CHUNK // 4, CHUNK // 2, CHUNK):
            raise ValueError(f"a tile must have 16, 32 or 64 places; got {self.places}")


def mixer_tiles(num_tokens: int, num_key: int, num_value: int) -> MixerTiles:
    """Choose tiles such that every multiprocessor has programs enough."""
    heads = 1 if num_key % 2 or num_value % 2 else 2
    places, parts = CHUNK, (2 * num_key + num_value) // heads
    while places > least_places(num_value) and num_tokens // places * parts < _PROGRAMS:
        places //= 2
    return MixerTiles(heads=heads, places=places)


def least_places(num_value: int) -> int:
    """Return the least places of a tile: so many that the gates of them take every thread once."""
    return min(max(16, CHUNK // (num_value & -num_value) * 2), CHUNK)


def check_tiles(tiles: MixerTiles, num_key: int, num_value: int) -> None:
    """Raise ValueError if a program would have heads of two kinds, or the gates of a tile would not be made."""
    if num_key % tiles.heads or num_value % tiles.heads:
        raise ValueError(
            f"heads of a program must divide the numbers of key and value heads; got {tiles.heads} for {num_key} and "
            f"{num_value}; ask for 1"
        )
    if tiles.places < least_places(num_value):
        raise ValueError(
            f"a tile must have {least_places(num_value)} places or more for {num_value} value heads; got {tiles.places}"
        )


def check_taps(num_taps: int) -> None:
    """Raise UnsupportedKernelError unless the Mosaic prefill has room for a convolution of so many taps."""
    if num_taps > MOST_TAPS:
        raise UnsupportedKernelError(
            f"a convolution must have at most {MOST_TAPS} taps for the Mosaic mixer; got {num_taps}; "
            "ask for kernels='jax', which runs any number"
        )


def check_value_heads(num_value: int) -> None:
    """Raise UnsupportedKernelError unless the Mosaic prefill has room for the gates of so many value heads."""
    if num_value > MOST_VALUE_HEADS:
        raise UnsupportedKernelError(
            f"there must be at most {MOST_VALUE_HEADS} value heads for the Mosaic mixer; got {num_value}; "
            "ask for kernels='jax', which runs any number"
        )
