"""FP8 block scales: the rule by hand, and the reference values."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from weight_folders import BF16, FP8

from gdn_jax.quantization import decode, num_blocks, row_scales, scale_shape
from gdn_jax.tensor_files import NUMPY_DTYPES, read_header


def read(path, name: str) -> np.ndarray:
    """Return one tensor, read by hand."""
    tensor = next(tensor for tensor in read_header(path) if tensor.name == name)
    data = path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
    return np.frombuffer(data, NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)


def test_golden_fp8_matrix_decodes_to_the_bit(golden_folder):
    # [200, 300]: neither side a multiple of 128. A bfloat16 scale times a float8 code is exact in float32.
    path = golden_folder / "kernels.safetensors"
    weight, scale = read(path, "fp8.weight"), read(path, "fp8.weight_scale_inv")
    assert scale.shape == scale_shape(weight.shape) == (2, 3)
    out = decode(jnp.asarray(weight), row_scales(scale, 0, 200), shape=(200, 300), dtype=np.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(out), read(path, "fp8.dequant"))


def test_every_float8_code_has_its_value():
    codes = np.arange(256, dtype=np.uint8).view(FP8)[None]
    out = decode(jnp.asarray(codes), np.ones((1, 2), np.float32), shape=(256,), dtype=np.dtype("float32"))
    sign, exponent, fraction = np.arange(256) >> 7, np.arange(256) >> 3 & 15, np.arange(256) & 7
    value = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((exponent == 15) & (fraction == 7), np.nan, np.where(sign == 1, -value, value))
    np.testing.assert_array_equal(np.asarray(out), value.astype(np.float32))


def test_blocks_are_counted_up():
    assert [num_blocks(size) for size in (1, 127, 128, 129, 256, 300)] == [1, 1, 1, 2, 2, 3]


def test_a_run_of_rows_keeps_the_scales_of_its_place():
    scale = np.arange(6, dtype=np.float32).reshape(3, 2).astype(BF16)
    found = row_scales(scale, 126, 4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[0, 1], [0, 1], [2, 3], [2, 3]])


def test_the_product_is_formed_in_float32_and_rounded_once():
    # In units of the last bfloat16 place, 2^-7, the product is 224.9; with the scale rounded first it would be 225.75.
    scale = np.float32([[1.0 + 2.0**-8 + 2.0**-20]])
    out = decode(jnp.asarray(np.array([[1.75]], FP8)), scale, shape=(1, 1), dtype=BF16)
    assert float(out[0, 0]) == 225 / 128


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_without_scales_values_are_only_rounded(dtype):
    stored = np.float32([[1.5, -2.25, 0.1], [3.0, 1e-3, 7.0]])
    out = decode(jnp.asarray(stored), None, shape=(6,), dtype=np.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(out), stored.reshape(6).astype(dtype))
