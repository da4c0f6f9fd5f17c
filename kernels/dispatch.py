"""Which implementation of the kernels runs: chosen once, at start-up, by name or `auto`; never silently changed."""

from dataclasses import dataclass
from enum import StrEnum

KERNEL_CHOICES = ("auto", "reference", "jax")


class UnsupportedKernelError(ValueError):
    """A kernel implementation was asked for by name and cannot run here."""


class Implementation(StrEnum):
    """How kernels are computed; every public kernel function takes one."""

    REFERENCE = "reference"  # token by token in float32: slow, defines the meaning
    JAX = "jax"  # plain JAX: chunked, any device, differentiable
    MOSAIC = "mosaic"  # Pallas kernels for Hopper GPUs


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """An implementation and why it was chosen, for the start-up log."""

    implementation: Implementation
    reason: str


def choose_kernels(requested: str, platform: str) -> KernelChoice:
    """Choose the implementation for a device platform ("cpu", "gpu").

    Args:
        requested: one of `KERNEL_CHOICES`.
        platform: the platform name of the device that will run.

    Raises:
        UnsupportedKernelError: `requested` is not a known choice.
    """
    if requested == "auto":
        return KernelChoice(implementation=Implementation.JAX, reason=f"the plain-JAX kernels run on {platform}")
    if requested not in KERNEL_CHOICES:
        raise UnsupportedKernelError(f"kernels must be one of {', '.join(KERNEL_CHOICES)}; got {requested!r}")
    return KernelChoice(implementation=Implementation(requested), reason="asked for by name")
