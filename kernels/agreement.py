"""Whether the arrays of one call agree in their sizes and dtypes.

Annotations say what each array must be, and tests check them at every call; outside tests nobody does. A kernel that is
handed a pool of fewer heads than its inputs have, reads and writes past the pool's end. So the public functions of the
delta rule, the mixer and attention check when they are traced, whichever implementation runs. What arrays hold (slots,
counts, block ids) is for the caller to get right.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Array, Shaped

# No boundary to export at, no token to replay, a convolution of one tap, a prefill that touches no lane.
_MAY_BE_ZERO = ("boundaries", "R", "K1", "lanes")


@dataclass(frozen=True)
class Described:
    """An array with what it must be.

    Attributes:
        array: itself.
        dimensions: their names, separated by spaces as in an annotation.
        dtype: its name; empty where several will do.
    """

    array: Shaped[Array, "..."]
    dimensions: str
    dtype: str = field(default="", kw_only=True)


def check_agreement(arrays: Mapping[str, Described], sizes: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Check arrays that go together: a dimension of one name has one size in all of them, 1 or more but for a few.

    Args:
        arrays: by the names that a caller knows them by.
        sizes: of dimensions that are known without them, each with where it stands.

    Raises:
        ValueError: an array has other dimensions or another dtype, sizes disagree, or one is 0 that may not be.
    """
    known = dict(sizes or {})
    for name, described in arrays.items():
        array, dimensions = described.array, described.dimensions.split()
        rule, got = f"{name} must be [{', '.join(dimensions)}]", f"got {list(array.shape)}"
        if array.ndim != len(dimensions):
            raise ValueError(f"{rule}; {got}")
        if described.dtype and array.dtype != described.dtype:
            raise ValueError(f"{name} must be {described.dtype}; got {array.dtype}; cast it")
        for dimension, size in zip(dimensions, array.shape, strict=True):
            expected, where = known.setdefault(dimension, (size, name))
            if size != expected:
                raise ValueError(f"{rule} with {dimension} = {expected} as in {where}; {got}")
            if size == 0 and dimension not in _MAY_BE_ZERO:
                raise ValueError(f"{rule} with {dimension} = 1 or more; {got}")


def check_groups(many: str, num_many: int, few: str, num_few: int) -> None:
    """Raise ValueError unless heads are shared evenly: `num_many` of the dimension `many` by `num_few` of `few`."""
    if num_many % num_few:
        raise ValueError(f"{many} must be a multiple of {few}; got {many} = {num_many} and {few} = {num_few}")
