"""Which implementation of the kernels runs: chosen once, at start-up, by name or `auto`; never silently changed."""

from dataclasses import dataclass
from enum import StrEnum

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


def choose_kernels(requested: str, device: jax.Device) -> KernelChoice:  # pyright: ignore[reportInvalidTypeForm] - jax binds the name at run time
    """Choose the implementation for a device.

    Args:
        requested: one of `KERNEL_CHOICES`.
        device: the one that will run.

    Raises:
        UnsupportedKernelError: `requested` is not a known choice, or the device cannot run it.
    """
    if requested == "auto":
        return KernelChoice(implementation=Implementation.JAX, reason=f"plain JAX runs on {device.device_kind}")
    if requested not in KERNEL_CHOICES:
        raise UnsupportedKernelError(f"kernels must be one of {', '.join(KERNEL_CHOICES)}; got {requested!r}")
    capability = getattr(device, "compute_capability", "none")  # of NVIDIA GPUs alone
    if requested == Implementation.MOSAIC and capability != _HOPPER:
        raise UnsupportedKernelError(
            f"kernels='mosaic' needs a GPU of compute capability {_HOPPER} (Hopper); {device.device_kind} has "
            f"{capability}; ask for kernels='auto'"
        )
    return KernelChoice(implementation=Implementation(requested), reason="asked for by name")
