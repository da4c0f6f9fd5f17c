"""Which boundaries of a sequence deserve a checkpoint: the difference between the cache modes, and nothing else is.

none    nothing
align   where a next request is known to look: the prompt's last boundary, the junction, turn borders, the turn end
all     those, and every multiple of `state_interval`
"""

from dataclasses import dataclass
from enum import StrEnum


class CacheMode(StrEnum):
    """How densely states are saved."""

    NONE = "none"
    ALIGN = "align"
    ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The rule of one mode.

    Attributes:
        mode: the mode.
        block_size: tokens per block: the grid of boundaries.
        state_interval: `all`: a multiple of the block size.
    """

    mode: CacheMode
    block_size: int
    state_interval: int

    def __post_init__(self) -> None:
        """Check the grid.

        Raises:
            ValueError: the interval is not a multiple of the block size.
        """
        if self.state_interval < self.block_size or self.state_interval % self.block_size:
            raise ValueError(
                f"state_interval must be a multiple of block_size ({self.block_size}); got {self.state_interval}"
            )

    @property
    def caches(self) -> bool:
        """Whether anything is looked up or saved at all."""
        return self.mode is not CacheMode.NONE

    def placed(
        self, *, num_prompt: int, num_known: int, turn_borders: tuple[int, ...], junction: int
    ) -> frozenset[int]:
        """Return the boundaries of a sequence's known tokens that a later request is expected to look for.

        Args:
            num_prompt: tokens of the prompt.
            num_known: tokens to prefill; more than the prompt after a preemption.
            turn_borders: counts up to which the next turn may share this prompt.
            junction: end of the blocks another sequence shares with this one.
        """
        if not self.caches:
            return frozenset()
        size = self.block_size
        wanted = {(count - 1) // size * size for count in (num_prompt, num_known)}
        wanted |= {count for count in (num_prompt, num_known) if count % size == 0}
        wanted |= {min(border, num_prompt) // size * size for border in turn_borders}
        wanted.add(junction)
        return frozenset(boundary for boundary in wanted if boundary > 0)

    def on_interval(self, boundary: int) -> bool:
        """Return whether a boundary is saved for its own sake."""
        return self.mode is CacheMode.ALL and boundary % self.state_interval == 0

    def in_span(self, start: int, end: int, placed: frozenset[int]) -> list[tuple[int, bool]]:
        """Return (boundary, is placed) for each boundary in (start, end] that a prefill span should export."""
        if not self.caches:
            return []
        found = {boundary: True for boundary in placed if start < boundary <= end}
        if self.mode is CacheMode.ALL:
            step = self.state_interval
            for boundary in range((start // step + 1) * step, end + 1, step):
                found.setdefault(boundary, False)
        return sorted(found.items())

    def in_fold(self, folded: int, num_replay: int) -> int | None:
        """Return the boundary that a fold reaches, if any: decode saves there, and the turn end may be that one."""
        boundary = (folded + num_replay) // self.block_size * self.block_size
        return boundary if self.caches and boundary > folded else None
