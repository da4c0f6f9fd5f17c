"""Seeded dialogues that a small model can learn: chat, function calls, sums and JSON.

Every answer follows from its question by rule or table, so it is right, and short. Combination makes the variety: there
are far more questions than any run draws. What `held_out` draws has never been asked in training; `dialogue.py` says
how far that goes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from random import Random

from gdn_jax.training.dialogues import arithmetic, chat, glosses, json_tasks, tools
from gdn_jax.training.dialogues.dialogue import Dialogue, fits

DOMAINS = ("chat", "tools", "arithmetic", "json")
_MOST_REPEATS = 3  # of one prompt in training: greetings would crowd out the rest, and none would be a gap
_MOST_DRAWS = 200_000  # in a row that bring nothing new


def generate(
    domain: str,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    pairs: Sequence[tuple[str, str]] = glosses.BUILT_IN,
) -> Iterator[Dialogue]:
    """Yield dialogues of a domain; the same arguments give the same ones.

    Args:
        domain: one of `DOMAINS`.
        count: how many, at least 0.
        seed: any whole number.
        held_out: dialogues whose last question is kept from training, each prompt once, instead of those for training.
        pairs: words and their meanings, which chat asks for.

    Raises:
        ValueError: the domain is unknown, or has fewer held-out prompts than asked for.
    """
    draws: dict[str, Callable[[Random], Dialogue]] = {
        "chat": partial(chat.dialogue, pairs=pairs),
        "tools": tools.dialogue,
        "arithmetic": arithmetic.dialogue,
        "json": json_tasks.dialogue,
    }
    if domain not in draws:
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}; got {domain!r}. Choose one of these")
    rng = Random(f"{domain}/{seed}/{'held_out' if held_out else 'train'}")
    return islice(_chosen(draws[domain], rng, held_out=held_out), count)


def _chosen(draw: Callable[[Random], Dialogue], rng: Random, *, held_out: bool) -> Iterator[Dialogue]:
    """Yield what one split may hold, without end."""
    seen: Counter[bytes] = Counter()
    most, idle = 1 if held_out else _MOST_REPEATS, 0
    while idle < _MOST_DRAWS:
        dialogue = draw(rng)
        idle += 1
        if not fits(dialogue, held_out=held_out):
            continue
        key = blake2b(repr(dialogue.asked()).encode(), digest_size=8).digest()
        seen[key] += 1
        if seen[key] <= most:
            idle = 0
            yield dialogue
    raise ValueError(
        f"{_MOST_DRAWS} draws in a row brought no new prompt; all there are have been drawn. Ask for fewer"
    )
