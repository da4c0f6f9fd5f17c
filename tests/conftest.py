"""Rules for every test: strict dtypes, no silent rank promotion, array shapes checked against their annotations."""

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")  # a test on another device asks for it by that variable
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("gdn_jax", "beartype.beartype")  # before any test imports a module of ours

# Most of the suite's time goes to compiling; what any process of this or an earlier run compiled is read back. The
# cache is bounded because a bounded one takes a lock (filelock's): else one could read what another has half written.
COMPILED = Path(__file__).resolve().parents[1] / ".cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_compilation_cache_max_size", 2**30)  # bytes
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# Nearly half of compiling is optimisation. What serving promises holds without, so that tests under this folder do
# without, but for those marked `optimised`: equal bits are easy where nothing is vectorised. All other tests compile as
# the product does, and so does every test where the environment has the variable that JAX reads.
PLAIN_STEPS = Path(__file__).resolve().parent / "serving"
IS_PLAIN = pytest.StashKey[bool]()
MAY_CHOOSE = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The reference checkpoints and expected values that live beside the checkout; skips without them."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden data at {GOLDEN}")
    return GOLDEN


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose how a test's steps are compiled, its fixtures' too; what was compiled the other way is forgotten."""
    plain = PLAIN_STEPS in item.path.parents and item.get_closest_marker("optimised") is None
    if MAY_CHOOSE and plain != item.config.stash.get(IS_PLAIN, False):
        item.config.stash[IS_PLAIN] = plain
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", plain)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of serving that compile steps first and those that reason about the host alone last.

    Files go to whichever worker is free, and a long one that starts last leaves the others idle.
    """

    def rank(item: pytest.Item) -> int:
        if PLAIN_STEPS not in item.path.parents:
            return 1
        compiles = {"jax", "make_llm", "make_runner"} & vars(getattr(item, "module", item)).keys()
        return 0 if compiles else 2

    items.sort(key=rank)
