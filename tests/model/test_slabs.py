"""Building arrays slab by slab."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax import slabs
from gdn_jax.slabs import build_array, slab_ranges


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=3), st.sampled_from([1, 2, 4]), st.integers(1, 5000))
def test_ranges_part_the_leading_axis_and_keep_the_bound(shape, itemsize, bound):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "SLAB_BYTES", bound)
        ranges = slab_ranges(tuple(shape), itemsize)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == shape[0]
    if len(shape) > 1:
        entry = int(np.prod(shape[1:])) * itemsize
        assert all(stop - start == 1 or (stop - start) * entry <= bound for start, stop in ranges)
    else:
        assert len(ranges) == 1


@pytest.mark.parametrize("bound", [1, 48, 100, 10**6])
def test_slabs_land_where_they_belong(monkeypatch, bound):
    monkeypatch.setattr(slabs, "SLAB_BYTES", bound)
    whole = np.arange(7 * 2 * 3, dtype=np.float32).reshape(7, 2, 3)
    made = []

    def make_slab(start: int, stop: int) -> jax.Array:
        made.append((start, stop))
        return jnp.asarray(whole[start:stop])

    built = build_array(jax.ShapeDtypeStruct(whole.shape, jnp.float32), make_slab, None)
    np.testing.assert_array_equal(np.asarray(built), whole)
    assert made == slab_ranges(whole.shape, 4)


def test_the_array_is_filled_in_place(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4)
    places = set()
    store = slabs._store

    def watched(whole: jax.Array, slab: jax.Array, start: int) -> jax.Array:
        result = store(whole, slab, start)
        assert whole.is_deleted()
        places.add(result.unsafe_buffer_pointer())
        return result

    monkeypatch.setattr(slabs, "_store", watched)
    build_array(jax.ShapeDtypeStruct((5, 300), jnp.float32), lambda a, b: jnp.ones((b - a, 300), jnp.float32), None)
    assert len(places) == 1
