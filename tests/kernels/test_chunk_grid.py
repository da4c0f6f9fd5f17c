"""The grid axis of the Mosaic prefills: rows at chunks of their own, and the way there and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.chunk_grid import (
    NOBODY,
    num_places,
    place_of_tokens,
    row_of_chunks,
    take,
    token_of_places,
    used_chunks,
)
from gdn_jax.kernels.numerics import CHUNK

NUM_TOKENS = 240
PACKINGS = {  # start and length of each row, and the tokens between it and the row before
    "chunks": ((0, 63, 0), (64, 64, 0), (128, 65, 0)),
    "misaligned, with gaps": ((70, 50, 3), (63, 2, 1), (1, 1, 64), (127, 66, 7)),
    "two chunks each": ((63, 2, 0),) * 4,
    "empty rows": ((0, 0, 0), (64, 0, 0), (70, 20, 5), (5, 0, 0)),
    "nothing": (),
}


def rows_of(packing: tuple[tuple[int, int, int], ...]) -> PrefillRows:
    """Return four rows, the missing ones empty."""
    start, length, gap = np.array([*packing, *((0, 0, 0),) * (4 - len(packing))]).T
    fields = {"offset": np.cumsum(gap + length) - length, "length": length, "start": start}
    fields |= {"read_slot": np.zeros(4), "write_slot": np.zeros(4), "export_slot": np.zeros((4, 0))}
    return PrefillRows(**{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()})


@pytest.mark.parametrize("name", PACKINGS)
def test_rows_have_chunks_of_their_own_and_tokens_their_absolute_places(name: str) -> None:
    rows = rows_of(PACKINGS[name])
    row_of, place = np.asarray(row_of_chunks(rows, NUM_TOKENS)), np.asarray(place_of_tokens(rows, NUM_TOKENS))
    is_used, is_owned = np.asarray(used_chunks(rows, len(row_of))), np.zeros(NUM_TOKENS, bool)
    assert len(row_of) * CHUNK == num_places(NUM_TOKENS, 4)
    for row in range(4):
        own = np.flatnonzero(row_of == row)
        offset, length, lead = (int(x[row]) for x in (rows.offset, rows.length, rows.start % CHUNK))
        if length == 0:  # a chunk of nobody else, from which its windows are moved
            assert len(own) == 1
            assert not is_used[own].any()
            continue
        first, count = offset // CHUNK + 2 * row, -(-(lead + length) // CHUNK)
        assert own.tolist() == list(range(first, first + count))
        assert is_used[own].all()
        assert place[offset : offset + length].tolist() == list(
            range(first * CHUNK + lead, first * CHUNK + lead + length)
        )
        is_owned[offset : offset + length] = True
    assert is_used.sum() == sum((row_of == row).sum() for row in range(4) if rows.length[row] > 0)
    assert (place[~is_owned] == NOBODY).all()


@pytest.mark.parametrize("name", PACKINGS)
def test_what_is_laid_out_comes_back_and_nothing_else_does(name: str) -> None:
    rows = rows_of(PACKINGS[name])
    place = place_of_tokens(rows, NUM_TOKENS)
    token = token_of_places(place, num_places(NUM_TOKENS, 4))
    is_owned, is_taken = np.asarray(place) != NOBODY, np.asarray(token) != NOBODY
    packed = jnp.where(is_owned, jnp.arange(1.0, NUM_TOKENS + 1), jnp.nan)[:, None]
    on_axis = np.asarray(take(packed, token))
    assert np.flatnonzero(is_taken).tolist() == np.sort(np.asarray(place)[is_owned]).tolist()
    assert (on_axis[~is_taken] == 0).all()
    back = np.asarray(take(jnp.where(is_taken[:, None], on_axis, jnp.nan), place))[:, 0]
    assert back.tolist() == np.where(is_owned, np.arange(1.0, NUM_TOKENS + 1), 0).tolist()
