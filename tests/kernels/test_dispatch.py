"""The choice of kernels: by name where the device runs them, with the reason; never another one silently."""

import jax
import pytest

from gdn_jax.kernels.dispatch import (
    KERNEL_CHOICES,
    Implementation,
    UnsupportedKernelError,
    choose_kernels,
    choose_kernels_for,
)

HOPPER = "NVIDIA H200", "9.0"


def test_auto_says_what_it_chose_and_for_which_device() -> None:
    choice = choose_kernels_for("auto", *HOPPER)
    assert choice.implementation is Implementation.JAX
    assert "NVIDIA H200" in choice.reason
    assert jax.devices()[0].device_kind in choose_kernels("auto").reason


@pytest.mark.parametrize("name", [name for name in KERNEL_CHOICES if name != "auto"])
def test_a_name_is_the_implementation_of_that_name(name: str) -> None:
    assert choose_kernels_for(name, *HOPPER).implementation == name


def test_mosaic_kernels_are_refused_on_what_is_not_a_hopper_gpu() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"needs a GPU of compute capability 9\.0.*NVIDIA B200 has 10\.0"):
        choose_kernels_for("mosaic", "NVIDIA B200", "10.0")
    with pytest.raises(UnsupportedKernelError, match=r"needs a GPU of compute capability 9\.0.*cpu has none"):
        choose_kernels_for("mosaic", "cpu", "none")


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedKernelError, match="auto, reference, jax, mosaic; got 'triton'"):
        choose_kernels_for("triton", *HOPPER)
