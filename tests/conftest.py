"""Rules for every test: strict dtypes, no silent rank promotion, array shapes checked against their annotations."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import jax
import pytest
import quick_checks

if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")  # a test on another device asks for it by that variable
# Each warpgroup that waits in Pallas' interpreter holds a thread of XLA's pool, which has one per processor unless this
# variable, read when the first array is made, says otherwise: on a machine of two nothing would be left for the others.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
quick_checks.install()  # before any test imports a module of ours

# Most of the suite's time goes to compiling; what any process of this or an earlier run compiled is read back. The
# cache is bounded because a bounded one takes a lock (filelock's): else one could read what another has half written.
COMPILED = Path(__file__).resolve().parents[1] / ".cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_compilation_cache_max_size", 2**30)  # bytes
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# A compiled function holds tens to hundreds of memory mappings. Linux gives a process 65,530 (vm.max_map_count); at the
# next one the compiler aborts, and a test process lives through files that map more than that in all.
MOST_MAPPINGS = 25_000

SERVING = Path(__file__).resolve().parent / "serving"
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="module", autouse=True)
def bounded_mappings() -> Iterator[None]:
    """Drop what is compiled at the end of a file once it maps much; what is wanted again is read back from disk."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.is_file() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:  # no such file, no such limit
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def steps_compiled_in_turn() -> Iterator[None]:
    """Compile no steps ahead: that puts descriptions in the place of arrays, which fail the check of annotations."""
    from gdn_jax.serving.runner import warm_up

    with patch.object(warm_up, "_MOST_THREADS", 1):
        yield


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The reference checkpoints and expected values that live beside the checkout; skips without them."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden data at {GOLDEN}")
    return GOLDEN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of serving that compile steps first and those that reason about the host alone last.

    Files go to whichever worker is free, and a long one that starts last leaves the others idle.
    """

    def rank(item: pytest.Item) -> int:
        if SERVING not in item.path.parents:
            return 1
        compiles = {"jax", "make_llm", "make_runner"} & vars(getattr(item, "module", item)).keys()
        return 0 if compiles else 2

    items.sort(key=rank)
