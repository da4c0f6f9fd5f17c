"""The chunk table against a walk over every token, on random packings of one shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.chunk_table import ChunkTable, chunk_table, max_chunks

CHUNK, NUM_TOKENS, NUM_ROWS, NUM_BOUNDARIES = 64, 300, 4, 5
build = jax.jit(chunk_table, static_argnums=1)


def random_rows(seed: int) -> PrefillRows:
    """Rows with gaps between them, empty ones among them, starts anywhere; every boundary wants an export."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, NUM_TOKENS + 1, 2 * NUM_ROWS)).reshape(NUM_ROWS, 2)
    cuts[rng.integers(NUM_ROWS)] = cuts[-1, 1]  # an empty row, its offset past later rows' tokens
    fields = {
        "offset": cuts[:, 0],
        "length": cuts[:, 1] - cuts[:, 0],
        "start": rng.choice([0, 1, 63, 64, 65, 127, 130, 1000], NUM_ROWS),
        "read_slot": 1 + np.arange(NUM_ROWS),
        "write_slot": 10 + np.arange(NUM_ROWS),
        "export_slot": 100 + np.arange(NUM_ROWS * NUM_BOUNDARIES).reshape(NUM_ROWS, NUM_BOUNDARIES),
    }
    return PrefillRows(**{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()})


def tables() -> list[tuple[PrefillRows, ChunkTable]]:
    return [(rows, build(rows, NUM_TOKENS)) for rows in map(random_rows, range(12))]


def test_every_owned_token_stands_at_its_absolute_place_and_comes_back() -> None:
    for rows, table in tables():
        row, owned = (np.asarray(x) for x in rows.row_of(NUM_TOKENS))
        position = np.asarray(rows.positions(NUM_TOKENS))
        token, is_token = np.asarray(table.token), np.asarray(table.is_token)
        assert sorted(token[is_token].tolist()) == np.flatnonzero(owned).tolist()
        for chunk, place in np.argwhere(is_token):
            t = token[chunk, place]
            assert table.row[chunk] == row[t]
            assert position[t] % CHUNK == place
        packed = jnp.arange(1, NUM_TOKENS + 1, dtype=jnp.float32)[:, None]
        assert table.put(table.take(packed))[:, 0].tolist() == np.where(owned, packed[:, 0], 0.0).tolist()


def test_each_row_loads_once_and_stores_once_at_its_end() -> None:
    for rows, table in tables():
        used = np.asarray(table.is_first | (table.write_slot != 0) | table.is_token.any(axis=1))
        assert np.asarray(table.read_slot)[np.asarray(table.is_first)].tolist() == rows.read_slot.tolist()
        written = np.asarray(table.write_slot)
        assert written[written != 0].tolist() == rows.write_slot.tolist()
        assert np.asarray(table.tokens_done)[written != 0].tolist() == rows.length.tolist()
        assert not used[used.sum() :].any(), "unused chunks come last"


def test_exports_are_the_boundaries_inside_each_row() -> None:
    for rows, table in tables():
        _, slots = rows.boundaries()
        listed = np.asarray(slots)[np.asarray(slots) != 0]
        exported = np.asarray(table.export_slot)
        assert exported[exported != 0].tolist() == listed.tolist()
        for chunk in np.flatnonzero(exported):
            r = int(table.row[chunk])
            assert (int(rows.start[r]) + int(table.tokens_done[chunk])) % CHUNK == 0


def test_rows_without_export_entries_export_nothing() -> None:
    rows = random_rows(0)
    fields = vars(rows) | {"export_slot": jnp.zeros((NUM_ROWS, 0), jnp.int32)}
    assert not chunk_table(PrefillRows(**fields), NUM_TOKENS).export_slot.any()


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (2, 1), (65, 1), (66, 1), (130, 1), (5, 3), (200, 3)])
def test_the_bound_on_chunks_is_reached_by_the_worst_packing_and_never_passed(num_tokens: int, num_rows: int) -> None:
    # Worst for a row: it starts on the last place of a chunk. Two tokens for each row that gets any, and one long row.
    pairs = min(num_rows, num_tokens // 2)
    lengths = [2] * pairs + [0] * (num_rows - pairs)
    lengths[0] += num_tokens - sum(lengths)
    worst = sum(max(1, (CHUNK - 1 + length + CHUNK - 1) // CHUNK) for length in lengths)
    assert max_chunks(num_tokens, num_rows) == worst
    assert max_chunks(num_tokens, num_rows) <= num_tokens // CHUNK + 2 * num_rows
    for seed in range(200):
        rng = np.random.default_rng(seed)
        lengths = rng.multinomial(num_tokens, rng.dirichlet(np.full(num_rows, 0.5)))
        starts = rng.integers(0, CHUNK, num_rows)
        chunks = sum(max(1, -(-(start + length) // CHUNK)) for start, length in zip(starts, lengths, strict=True))
        assert chunks <= max_chunks(num_tokens, num_rows)
