"""Seeded random parameters, for trying out sizes and speeds without weight files.

The numbers keep activations of any model near unit size, so that logits are finite, differ between tokens, and decays
lie where those of trained models do:

    matrix [..., out, in]           uniform, mean 0, standard deviation in^-0.5 (0.01 to 0.03 at released widths)
    zero-centred norms              uniform in -0.02..0.02;  the GDN output norm is 1 plus that
    convolution [C, K]              uniform, |w| <= K^-0.5
    A_log, dt_bias                  A in 1..16;  softplus(dt_bias) log-uniform in 1e-3..1e-1

A parameter's values depend on the seed, its path, its shape and its dtype, and on nothing else in the model.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float, UInt32

from gdn_jax.slabs import build_array
from gdn_jax.tensor_names import ParameterPath, Targets

_NORM_SPREAD = 0.02


def dummy_tensors(targets: Targets, seed: int, *, put_on: Sharding | None = None) -> dict[ParameterPath, jax.Array]:
    """Return random arrays for a set of parameters, made on the device.

    Args:
        targets: shape and dtype of each parameter.
        seed: same seed, same arrays.
        put_on: where the arrays go, each as a whole (one device, or copies on several); None is JAX's default device.
    """
    return {path: _dummy(seed, path, target, put_on) for path, target in targets.items()}


def _dummy(
    seed: int, path: ParameterPath, target: jax.ShapeDtypeStruct, put_on: Sharding | None
) -> Float[Array, "..."]:
    kind = str(path[-1]) if path[-1] in _RULES else "vector" if len(target.shape) == 1 else "matrix"

    def make_slab(start: int, stop: int) -> Float[Array, "..."]:
        key = np.uint32(zlib.crc32(f"{seed} {path} {start}".encode()))
        return _draw(jax.device_put(key, put_on), kind, (stop - start, *target.shape[1:]), target.dtype)

    return build_array(target, make_slab, put_on)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: UInt32[Array, ""], kind: str, shape: tuple[int, ...], dtype: np.dtype) -> Float[Array, "..."]:
    """Draw in float32 by the rule of `kind`, and round once.

    A hash of the element's index, not `jax.random`: it compiles several times faster, which counts with a compilation
    per shape, and it fuses into one loop without temporaries.
    """
    bits = _mix(_mix(jax.lax.iota(jnp.uint32, math.prod(shape))) ^ key)
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-24  # 24 bits are what float32 holds exactly
    return _RULES[kind](unit.reshape(shape)).astype(dtype)


def _mix(x: UInt32[Array, "size"]) -> UInt32[Array, "size"]:
    """Scramble integers: the bijection `lowbias32` of Wellons' hash-prospector."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _centred(unit: Float[Array, "*shape"], bound: float) -> Float[Array, "*shape"]:
    return (2.0 * unit - 1.0) * bound


def _time_step_bias(unit: Float[Array, "heads"]) -> Float[Array, "heads"]:
    step = jnp.exp(math.log(1e-3) + math.log(100.0) * unit)
    return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus


_RULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "matrix": lambda unit: _centred(unit, math.sqrt(3.0 / unit.shape[-1])),
    "vector": lambda unit: _centred(unit, _NORM_SPREAD),
    "norm_weight": lambda unit: 1.0 + _centred(unit, _NORM_SPREAD),
    "conv_weight": lambda unit: _centred(unit, unit.shape[-1] ** -0.5),
    "a_log": lambda unit: jnp.log(1.0 + 15.0 * unit),
    "dt_bias": _time_step_bias,
}
