"""Exact hit lengths, with and without drafts, against an oracle that works on token prefixes.

With pools that hold everything, the oracle knows which prefixes have blocks and which have states: it is told what was
asked and answered, and nothing of the core. Every test asserts that a hit happened and how long it was.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from oracles.core_rig import STOP_TOKEN, CoreRig
from oracles.tell_tale import next_token

from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.request import FinishReason, Request

SIZE, INTERVAL = 4, 8
MODES = [CacheMode.ALIGN, CacheMode.ALL]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TAIL = [2, 7, 1, 8, 2, 8]


def floor(count: int) -> int:
    return count // SIZE * SIZE


@dataclass
class PrefixOracle:
    """Which prefixes have blocks, and which have a state."""

    mode: CacheMode
    blocks: set[tuple[int, ...]] = field(default_factory=set)
    states: set[tuple[int, ...]] = field(default_factory=set)

    def _deepest(self, prompt: Sequence[int], found: Callable[[tuple[int, ...]], bool]) -> int:
        cuts = range(floor(len(prompt) - 1), 0, -SIZE)
        return next((cut for cut in cuts if found(tuple(prompt[:cut]))), 0)

    def hit(self, prompt: Sequence[int]) -> int:
        return self._deepest(prompt, lambda prefix: prefix in self.states and prefix in self.blocks)

    def junction(self, prompt: Sequence[int]) -> int:
        return self._deepest(prompt, self.blocks.__contains__)

    def served(self, prompt: Sequence[int], answer: Sequence[int], borders: tuple[int, ...] = ()) -> None:
        """Take in a request that ran to its length: its newest token was never run."""
        text, end = [*prompt, *answer], len(prompt) + len(answer) - 1
        saved = {floor(len(prompt) - 1), floor(len(prompt)), self.junction(prompt), *range(SIZE, end + 1, SIZE)}
        saved -= {cut for cut in saved if cut < floor(len(prompt) - 1)} - {self.junction(prompt)}
        saved |= {floor(min(border, len(prompt))) for border in borders}
        if self.mode is CacheMode.ALL:
            saved |= set(range(INTERVAL, end + 1, INTERVAL))
        start = self.hit(prompt)
        self.states |= {tuple(text[:cut]) for cut in saved if cut > start}
        self.blocks |= {tuple(text[:cut]) for cut in range(SIZE, end + 1, SIZE)}


class Pair:
    """A rig and an oracle that are told the same."""

    def __init__(self, mode: CacheMode, num_drafts: int = 0, **options) -> None:
        sizes = {"vocabulary": 50, "num_blocks": 160, "num_slots": 90, "budget": 16, "max_model_len": 400}
        self.rig = CoreRig(mode=mode, interval=INTERVAL, num_drafts=num_drafts, **{**sizes, **options})
        self.oracle = PrefixOracle(mode)
        self.count = 0

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, borders: tuple[int, ...] = ()) -> Request:
        """Run a request to its length; its hit must be the oracle's."""
        expected = self.oracle.hit(prompt)
        self.count += 1
        name = f"r{self.count}"
        request = self.rig.serve(name, prompt, max_tokens=max_tokens, turn_borders=borders)
        assert request.num_cached == expected, f"hit {request.num_cached} of {len(prompt)}, not {expected}"
        self.oracle.served(prompt, self.rig.outputs[request.request_id], borders)
        return request


@pytest.mark.parametrize("num_drafts", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", range(6, 15))
def test_resend_sibling_and_next_turn_hit_what_the_oracle_says(mode: CacheMode, length: int, num_drafts: int) -> None:
    for max_tokens in (1, 2, 5, 7):
        prompt = PROMPT[:length]
        pair = Pair(mode, num_drafts)
        turn = pair.rig.text(pair.ask(prompt, max_tokens).request_id)
        assert pair.ask(prompt, max_tokens).num_cached == floor(length - 1)
        assert pair.ask([*prompt, *TAIL]).num_cached == floor(length)
        assert pair.ask([*turn, *TAIL]).num_cached == floor(len(turn) - 1)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_random_conversations_hit_what_the_oracle_says(mode: CacheMode, num_drafts: int) -> None:
    dice = random.Random(7)
    for _ in range(12):
        pair = Pair(mode, num_drafts)
        texts = [[dice.randint(0, 49) for _ in range(dice.randint(5, 30))]]
        for _ in range(8):
            text = dice.choice(texts)
            prompt = [*text[: dice.randint(1, len(text))], *(dice.randint(0, 49) for _ in range(dice.randint(0, 9)))]
            borders = tuple(dice.randint(0, len(prompt)) for _ in range(dice.randint(0, 2)))
            request = pair.ask(prompt, dice.randint(1, 12), borders)
            texts.append(list(request.tokens))
        assert pair.rig.scheduler.counts.hit_tokens > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_a_prompt_sent_twice_is_never_all_cached(mode: CacheMode, length: int) -> None:
    pair = Pair(mode)
    first = pair.ask(PROMPT[:length], 6)
    again = pair.ask(PROMPT[:length], 6)
    assert again.num_cached == {3: 0, 4: 0, 5: 4, 8: 4, 9: 8}[length]
    assert again.tokens == first.tokens
    assert pair.ask([*PROMPT[:length], *TAIL]).num_cached == floor(length)


def test_the_second_prompt_that_shares_a_prefix_saves_where_they_part_and_the_third_hits_it() -> None:
    pair = Pair(CacheMode.ALIGN)
    shared = PROMPT[:10]
    pair.ask([*shared, 20, 20, 20, 20, 20, 20])
    assert pair.ask([*shared, 30, 30, 30, 30, 30, 30]).num_cached == 0
    assert pair.ask([*shared, 40, 40, 40, 40, 40, 40]).num_cached == 8
    assert pair.rig.scheduler.counts.gap_tokens == 8


def test_the_gap_is_computed_again_into_own_blocks_and_is_not_counted_as_cached() -> None:
    pair = Pair(CacheMode.ALIGN)
    pair.ask(PROMPT[:6])  # a state at 4
    pair.ask(PROMPT[:14])  # and one at 12; blocks up to there
    before = pair.rig.scheduler.counts.prefilled_tokens
    request = pair.ask([*PROMPT[:10], 20, 20, 20])  # blocks are known up to 8, a state only at 4
    assert request.num_cached == 4
    assert pair.rig.scheduler.counts.gap_tokens == 4
    assert pair.rig.scheduler.counts.prefilled_tokens - before == 13 - 4
    assert pair.ask([*PROMPT[:10], 30, 30]).num_cached == 8  # where they parted


@pytest.mark.parametrize(("mode", "second", "third"), [(CacheMode.ALIGN, 0, 12), (CacheMode.ALL, 8, 12)])
def test_prompts_that_part_in_mid_block_reuse_the_blocks_before(mode: CacheMode, second: int, third: int) -> None:
    pair = Pair(mode)
    shared = PROMPT[:14]
    hits = [pair.ask([*shared, *[20 + number] * 12]).num_cached for number in range(10)]
    assert hits == [0, second, *[third] * 8]


@pytest.mark.parametrize("mode", MODES)
def test_the_boundary_before_a_turn_border_is_hit_when_the_next_turn_rewrites_what_follows(mode: CacheMode) -> None:
    pair = Pair(mode)
    pair.ask(PROMPT, 5, borders=(7,))
    assert pair.ask([*PROMPT[:7], 20, 21, 22, 23]).num_cached == 4
    assert pair.rig.scheduler.counts.gap_tokens == 0


def test_interval_saves_let_a_fork_start_at_the_last_multiple_before_it() -> None:
    dense, sparse = Pair(CacheMode.ALL), Pair(CacheMode.ALIGN)
    prompt = [number * 7 % 50 for number in range(60)]
    for pair, expected in ((dense, 16), (sparse, 0)):
        pair.ask(prompt)
        assert pair.ask([*prompt[:21], 49, 48, 47]).num_cached == expected


def test_decode_saves_on_the_interval_too() -> None:
    pair = Pair(CacheMode.ALL)
    text = pair.rig.text(pair.ask(PROMPT[:6], 30).request_id)
    for _ in range(3):
        assert pair.ask([*text[:18], 49, 49]).num_cached == 16
    order = list(pair.rig.scheduler.holdings.checkpoints._interval)
    chain = pair.rig.ended["r1"].chain
    kept = [boundary for boundary in range(4, 36, 4) if chain.name(text, boundary) in order]
    assert kept == [8, 12, 20, 24, 28]  # 4 and 32 end the prompt and the turn, and 16 was hit


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_turn_of_a_conversation_reuses_the_turns_before(mode: CacheMode, num_drafts: int) -> None:
    pair = Pair(mode, num_drafts)
    text, cached = list(TAIL), [-1]
    for turn in range(12):
        text += [turn, 40, 41, 42, 43]
        request = pair.ask(text, 6)
        assert request.num_cached is not None
        assert request.num_cached > cached[-1]
        cached.append(request.num_cached)
        text = list(request.tokens)
    assert cached[-1] == floor(len(text) - 6 - 5 - 1)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_going_back_in_a_conversation_hits_a_state_that_was_saved_there(mode: CacheMode, num_drafts: int) -> None:
    """A state cannot be cut: to answer again, or to edit the last message, starts from the checkpoint before."""
    pair = Pair(mode, num_drafts)
    first = pair.ask(PROMPT, 6)
    second = [*first.tokens, *TAIL, 40, 41]
    answered = pair.ask(second, 9)
    again = pair.ask(second, 9)
    assert again.num_cached == floor(len(second) - 1)
    assert again.tokens == answered.tokens
    edited = pair.ask([*first.tokens, 45, 46, 47], 9)
    assert edited.num_cached == floor(len(first.tokens) - 1)


@pytest.mark.parametrize("mode", MODES)
def test_conversations_that_take_turns_all_keep_their_newest_state(mode: CacheMode) -> None:
    """Slots hold what six of them save in one turn, and little more: older states go, but nobody loses the newest."""
    rig = CoreRig(mode=mode, vocabulary=50, num_slots=22, num_blocks=200, budget=64)
    texts = {number: [number, *PROMPT] for number in range(6)}
    for turn in range(3):
        for number, text in texts.items():
            request = rig.serve(f"turn {turn} of {number}", text, max_tokens=6)
            assert request.num_cached == (floor(len(text) - 4 - 1) if turn else 0)
            texts[number] = [*request.tokens, 40, 41, 42]
    assert rig.scheduler.holdings.checkpoints.num_evicted > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_shorter_than_a_block_is_a_miss_that_is_counted(mode: CacheMode) -> None:
    rig = CoreRig(mode=mode, vocabulary=50)
    for number in range(2):
        assert rig.serve(f"r{number}", PROMPT[: SIZE - 1], max_tokens=1).num_cached == 0
    counts = rig.scheduler.counts
    assert (counts.queried_tokens, counts.hit_tokens) == (2 * (SIZE - 1), 0)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_long_answer_retires_neither_the_prompt_nor_the_turn(num_drafts: int) -> None:
    pair = Pair(CacheMode.ALIGN, num_drafts, num_slots=5)  # two for the prompt, one to run in, one for the turn
    prompt = PROMPT[:12]
    text = pair.rig.text(pair.ask(prompt, 16).request_id)
    assert pair.rig.serve("resend", prompt, max_tokens=1).num_cached == 8
    assert pair.rig.serve("sibling", [*prompt, 49], max_tokens=1).num_cached == 12
    assert pair.rig.serve("next", [*text, 49], max_tokens=1).num_cached == floor(len(text) - 1)


def test_the_state_after_an_accepted_stop_token_is_the_turn_end_when_it_fills_a_block() -> None:
    # A stop token in the middle of a verified window has been run, so the whole answer is in the state.

    def exact(known: tuple[int, ...], count: int) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < count:
            drafts.append(next_token((*known, *drafts), 2))
        return drafts

    found = set[tuple[int, int, int]]()
    for first in range(40):
        prompt = [int(letter) for letter in f"{first:09b}"][first % 5 :]
        pair = Pair(CacheMode.ALIGN, 3, vocabulary=2, draft=exact)
        request = pair.rig.serve("stops", prompt, max_tokens=30, stops=True)
        assert request.finish is FinishReason.STOP
        assert request.tokens[-1] == STOP_TOKEN
        last = [plan.rows[0] for plan in pair.rig.plans if plan.rows[0].tokens][-1]
        was_run = last.end >= request.num_known  # else it is the bonus token, which nobody has run
        hit = pair.rig.serve("next", [*request.tokens, 0, 0, 0, 0], max_tokens=1).num_cached
        assert hit == floor(request.num_known - (0 if was_run else 1))
        found.add((was_run, request.num_known % SIZE == 0, hit > 0))
    assert {(True, True, True), (False, True, True), (True, False, True)} <= found


def test_another_salt_never_shares_and_the_same_salt_does() -> None:
    rig = CoreRig(vocabulary=50, salts=(b"", b"a", b"b"), num_blocks=60, num_slots=20)
    hits = [
        rig.serve(f"r{number}", PROMPT, cache_salt=salt, max_tokens=1).num_cached
        for number, salt in enumerate([b"", b"a", b"b", b"a", b""])
    ]
    assert hits == [0, 0, 0, 12, 12]


def test_without_a_cache_nothing_is_looked_up_or_saved() -> None:
    pair = Pair(CacheMode.NONE)
    for _ in range(3):
        assert pair.rig.serve(f"r{pair.count}", PROMPT).num_cached == 0
        pair.count += 1
    counts = pair.rig.scheduler.counts
    assert (counts.queried_tokens, counts.hit_tokens, counts.saves, counts.saves_skipped) == (0, 0, 0, 0)
    assert pair.rig.scheduler.holdings.blocks.names() == {}
