"""The rules that conftest.py sets for every test are in force: each would hide mistakes if it were off."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, Self

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import quick_checks
from beartype import beartype
from jaxtyping import Float, TypeCheckError

from gdn_jax.kernels.numerics import einsum
from gdn_jax.serving.core.blocks import BlockPool
from gdn_jax.serving.core.limits import Limits


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)


def test_silent_rank_promotion_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_an_array_that_breaks_its_annotation_is_refused() -> None:
    einsum("i,i->", jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeCheckError):
        einsum("i,i->", jnp.arange(3), jnp.arange(3))


def test_a_value_that_breaks_the_annotation_of_a_function_of_the_host_is_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(TypeCheckError):
        BlockPool("4")  # pyright: ignore
    with pytest.raises(TypeCheckError):
        pool.try_take(1.0)  # pyright: ignore
    with pytest.raises(TypeCheckError):
        Limits(**dict.fromkeys(("num_blocks", "num_slots", "num_lanes", "budget", "max_model_len"), "8"))


def test_what_a_function_of_the_host_returns_is_checked_unless_checks_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @quick_checks.jaxtyped(typechecker=beartype)
    def count(names: dict[str, int | None]) -> int:
        return names["all"]  # pyright: ignore

    assert count({"all": 3}) == 3
    with pytest.raises(TypeCheckError):
        count({"all": None})
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert count({"all": None}) is None


type Pair = tuple[int, jax.Array]
Name = NewType("Name", str)


@pytest.mark.parametrize(
    "hint",
    [
        jax.Array,
        Float[jax.Array, "T V"],
        dict[str, Float[np.ndarray, "T"]],
        int | Float[jax.Array, ""],
        Callable[[jax.Array], int],
        Annotated[int, "some"],
        Pair,
        Self,
        "Later",
    ],
    ids=str,
)
def test_annotations_of_arrays_and_unresolved_ones_are_left_to_jaxtyping(hint: object) -> None:
    assert not quick_checks.is_plain(hint)


@pytest.mark.parametrize(
    "hint", [None, int, Any, Name, list[Name | None], Callable[..., str], Literal["a", 2]], ids=str
)
def test_annotations_of_the_host_are_checked_by_beartype_alone(hint: object) -> None:
    assert quick_checks.is_plain(hint)
