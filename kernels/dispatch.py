"""Which implementation of the kernels runs: chosen once, at start-up, by name or `auto`; never silently changed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

import jax

KERNEL_CHOICES = ("auto", "reference", "jax", "mosaic")
_HOPPER = "9.0"


class UnsupportedKernelError(ValueError):
    """A kernel implementation was asked for by name and cannot run here."""


class Implementation(StrEnum):
    """How kernels are computed; every public kernel function takes one."""

    REFERENCE = "reference"  # token by token in float32: slow, defines the meaning
    JAX = "jax"  # plain JAX: chunked, any device, differentiable
    MOSAIC = "mosaic"  # Pallas kernels for Hopper GPUs where an operation has one, plain JAX for the rest


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """An implementation and why it was chosen, for the start-up log."""

    implementation: Implementation
    reason: str


def choose_kernels(requested: str) -> KernelChoice:
    """Choose the implementation for the device that runs: the first one.

    Args:
        requested: one of `KERNEL_CHOICES`.

    Raises:
        UnsupportedKernelError: `requested` is not a known choice, or the device cannot run it.
    """
    device = jax.devices()[0]
    return choose_kernels_for(requested, device.device_kind, getattr(device, "compute_capability", "none"))


def choose_kernels_for(requested: str, device_kind: str, compute_capability: str) -> KernelChoice:
    """Choose as `choose_kernels` does, for a device by its kind; only NVIDIA GPUs have a compute capability."""
    if requested == "auto":
        return KernelChoice(implementation=Implementation.JAX, reason=f"plain JAX runs on {device_kind}")
    if requested not in KERNEL_CHOICES:
        raise UnsupportedKernelError(f"kernels must be one of {', '.join(KERNEL_CHOICES)}; got {requested!r}")
    if requested == Implementation.MOSAIC and compute_capability != _HOPPER:
        raise UnsupportedKernelError(
            f"kernels='mosaic' needs a GPU of compute capability {_HOPPER} (Hopper); {device_kind} has "
            f"{compute_capability}; ask for kernels='auto'"
        )
    return KernelChoice(implementation=Implementation(requested), reason="asked for by name")


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function whose module is imported at the first call: Pallas takes a second, and few devices run it."""

    def call(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **settings)

    return call
