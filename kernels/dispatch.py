"""Which implementation of the kernels runs: chosen once, at start-up, by name or `auto`; never silently changed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

KERNEL_CHOICES = ("auto", "reference", "jax", "mosaic")
_HOPPER = "9.0"


class UnsupportedKernelError(ValueError):
    """A kernel implementation was asked for by name and cannot run here."""


class Implementation(StrEnum):
    """How kernels are computed; every public kernel function takes one, and has a table of where each leads.

    With MOSAIC, Pallas kernels run all that a GDN layer does between its projections, and attention, in decode and in
    prefill. Plain JAX runs grouped products, training, and what tensor cores would multiply if it were not float32:
    attention, and the prefill of GDN layers (`on_tensor_cores`).
    """

    REFERENCE = "reference"  # token by token in float32: slow, defines the meaning
    JAX = "jax"  # plain JAX: chunked, any device, differentiable
    MOSAIC = "mosaic"  # Pallas kernels for Hopper GPUs


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """An implementation and why it was chosen, for the start-up log."""

    implementation: Implementation
    reason: str
    is_fallback: bool = False  # whether the device has faster kernels, which cannot run the model


def _accept_all() -> None:
    """Refuse nothing."""


def choose_kernels(requested: str, check: Callable[[], None] = _accept_all) -> KernelChoice:
    """Choose the implementation for the device that runs: the first one.

    Args:
        requested: one of `KERNEL_CHOICES`.
        check: raises UnsupportedKernelError where the Mosaic kernels cannot run what is to be run.

    Raises:
        UnsupportedKernelError: `requested` is not a known choice, or it names what the device cannot run, or `check`
            refuses.
    """
    device = jax.devices()[0]
    return choose_kernels_for(requested, device.device_kind, getattr(device, "compute_capability", "none"), check)


def choose_kernels_for(
    requested: str, device_kind: str, compute_capability: str, check: Callable[[], None] = _accept_all
) -> KernelChoice:
    """Choose as `choose_kernels` does, for a device by its kind; only NVIDIA GPUs have a compute capability."""
    if requested not in KERNEL_CHOICES:
        raise UnsupportedKernelError(f"kernels must be one of {', '.join(KERNEL_CHOICES)}; got {requested!r}")
    is_hopper = compute_capability == _HOPPER
    if requested == "auto":
        if not is_hopper:
            return KernelChoice(implementation=Implementation.JAX, reason=f"plain JAX runs on {device_kind}")
        try:
            check()
        except UnsupportedKernelError as error:
            reason = f"plain JAX runs on {device_kind}, slower than the Pallas kernels would: {error}"
            return KernelChoice(implementation=Implementation.JAX, reason=reason, is_fallback=True)
        return KernelChoice(implementation=Implementation.MOSAIC, reason=f"Pallas kernels for {device_kind}")
    if requested == Implementation.MOSAIC:
        if not is_hopper:
            raise UnsupportedKernelError(
                f"kernels='mosaic' needs a GPU of compute capability {_HOPPER} (Hopper); {device_kind} has "
                f"{compute_capability}; ask for kernels='auto'"
            )
        check()
    return KernelChoice(implementation=Implementation(requested), reason="asked for by name")


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function whose module is imported at the first call: Pallas takes a second, and few devices run it."""

    def call(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **settings)

    return call


def tensor_cores_multiply(dtype: jnp.dtype) -> bool:
    """Return whether tensor cores multiply activations of this dtype as they are; they round float32."""
    return dtype != jnp.float32


def on_tensor_cores(module: str, name: str, in_plain_jax: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leads to a Pallas kernel, or to plain JAX where tensor cores cannot multiply.

    Args:
        module: of the kernel.
        name: of the kernel.
        in_plain_jax: the same in plain JAX. Both take activations first: an array, or a tree of one.
    """
    kernel = imported_when_called(module, name)

    def call(activations: Any, *others: Any, **settings: Any) -> Any:
        (array,) = jax.tree.leaves(activations)
        return (kernel if tensor_cores_multiply(array.dtype) else in_plain_jax)(activations, *others, **settings)

    return call
