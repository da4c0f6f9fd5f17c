"""Where the heads of q, k and v stand in the arrays that the Mosaic prefill reads, which may be one and the same.

A caller that computes all three in one kernel has them in one array. Slices of it would be copied by XLA before a
kernel could have them; a kernel that counts heads from where they begin reads them as they lie.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FirstHeads:
    """The number of key heads, and which heads of their arrays are the first ones of q, k and v.

    Attributes:
        num_key: heads of q, and of k.
        q: the first head of q in the array that holds q.
        k: the first head of k in the array that holds k.
        v: the first head of v in the array that holds v.
    """

    num_key: int
    q: int = 0
    k: int = 0
    v: int = 0

    @classmethod
    def side_by_side(cls, num_key: int) -> "FirstHeads":
        """Return where they stand in one array `[q | k | v]`."""
        return cls(num_key=num_key, k=num_key, v=2 * num_key)
