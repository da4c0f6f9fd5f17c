"""The quantization section of a published config: which layout the weights are stored in.

Only names and numbers; reading the tensors belongs to the weight loader. Which matrices are quantized is not read here
either: a matrix is when a scale tensor stands beside it, and a config's name list need not match a text-only model.
"""

from dataclasses import dataclass

from gdn_jax.config_keys import ConfigKeys, shown
from gdn_jax.errors import ConfigError, UnsupportedModelError

_SUPPORTED = (
    "supported are bfloat16, float16 and float32 weights and the official FP8 releases (fp8, e4m3, 128 x 128 blocks)"
)


@dataclass(frozen=True, kw_only=True)
class Fp8Quantization:
    """Block-quantized FP8 (e4m3) weights; the scale of a block multiplies its values.

    Attributes:
        block_shape: rows and columns that share one scale.
    """

    block_shape: tuple[int, int] = (128, 128)


def read_quantization(keys: ConfigKeys | None) -> Fp8Quantization | None:
    """Read `quantization_config`; None without one.

    Raises:
        ConfigError: the section names no method, or a value has the wrong type.
        UnsupportedModelError: anything but the official FP8 layout.
    """
    if keys is None:
        return None
    method = keys.text("quant_method", "")
    if not method:
        raise ConfigError(
            f"{keys.path('quant_method')} must name the quantization; got nothing; "
            "restore the published section, or remove it where the weights are not quantized"
        )
    if method != "fp8":
        raise UnsupportedModelError(f"{keys.path('quant_method')} must be fp8; got {shown(method)}; {_SUPPORTED}")
    for key, default, supported in (("fmt", "e4m3", "e4m3"), ("activation_scheme", "dynamic", "dynamic")):
        value = keys.text(key, default)
        if value != supported:
            raise UnsupportedModelError(f"{keys.path(key)} must be {supported}; got {shown(value)}; {_SUPPORTED}")
    block = keys.integers("weight_block_size")
    if block != (128, 128):
        raise UnsupportedModelError(
            f"{keys.path('weight_block_size')} must be [128, 128]; "
            f"got {shown(keys.raw('weight_block_size'))}; {_SUPPORTED}"
        )
    return Fp8Quantization(block_shape=(128, 128))
