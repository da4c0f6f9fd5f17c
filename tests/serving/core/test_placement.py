"""Which boundaries deserve a checkpoint, mode by mode, spelled out."""

import pytest

from gdn_jax.serving.core.placement import CacheMode, Placement

NONE, ALIGN, ALL = CacheMode.NONE, CacheMode.ALIGN, CacheMode.ALL


def rule(mode: CacheMode, *, block_size: int = 64, state_interval: int = 512) -> Placement:
    return Placement(mode=mode, block_size=block_size, state_interval=state_interval)


def placed(mode: CacheMode, num_prompt: int, *, known: int = 0, borders: tuple[int, ...] = (), junction: int = 0):
    return rule(mode).placed(
        num_prompt=num_prompt, num_known=known or num_prompt, turn_borders=borders, junction=junction
    )


@pytest.mark.parametrize("interval", [0, 32, 96, -64])
def test_an_interval_off_the_block_grid_is_refused_with_the_numbers(interval: int) -> None:
    with pytest.raises(ValueError, match=rf"multiple of block_size \(64\); got {interval}"):
        rule(ALL, state_interval=interval)


@pytest.mark.parametrize("mode", [ALIGN, ALL])
@pytest.mark.parametrize(
    ("num_prompt", "boundaries"),
    [(1, set()), (63, set()), (64, {64}), (65, {64}), (127, {64}), (128, {64, 128}), (129, {128}), (1000, {960})],
)
def test_the_last_boundary_before_the_last_token_is_placed_and_the_end_if_it_is_one(mode, num_prompt, boundaries):
    assert placed(mode, num_prompt) == boundaries


@pytest.mark.parametrize("mode", [ALIGN, ALL])
def test_a_junction_is_placed(mode: CacheMode) -> None:
    assert placed(mode, 1000, junction=320) == {960, 320}


@pytest.mark.parametrize("mode", [ALIGN, ALL])
def test_turn_borders_are_placed_at_the_boundary_before_them_and_never_past_the_prompt(mode: CacheMode) -> None:
    assert placed(mode, 1000, borders=(200, 256, 63, 5000)) == {960, 192, 256}


def test_after_a_preemption_both_the_prompt_and_all_that_is_known_end_in_a_placement() -> None:
    assert placed(ALIGN, 100, known=300) == {64, 256}
    assert placed(ALIGN, 128, known=192) == {64, 128, 192}


def test_without_a_cache_nothing_is_saved_anywhere() -> None:
    off = rule(NONE)
    assert not off.caches
    assert placed(NONE, 1000, borders=(200,), junction=320) == frozenset()
    assert off.in_span(0, 4096, frozenset({64})) == []
    assert off.in_fold(60, 8) is None
    assert not off.on_interval(512)


def test_align_exports_the_placed_boundaries_of_a_span_and_no_others() -> None:
    assert rule(ALIGN).in_span(64, 1024, frozenset({64, 128, 1024, 1088})) == [(128, True), (1024, True)]


def test_all_exports_the_interval_too_and_a_placed_one_stays_placed() -> None:
    assert rule(ALL).in_span(0, 1536, frozenset({512, 640})) == [
        (512, True),
        (640, True),
        (1024, False),
        (1536, False),
    ]
    assert rule(ALL).in_span(512, 1024, frozenset()) == [(1024, False)]
    assert rule(ALL).in_span(512, 1023, frozenset()) == []


def test_an_interval_of_one_block_is_dense() -> None:
    dense = rule(ALL, state_interval=64)
    assert [boundary for boundary, _ in dense.in_span(64, 320, frozenset())] == [128, 192, 256, 320]
    assert dense.on_interval(64)


@pytest.mark.parametrize("mode", [ALIGN, ALL])
@pytest.mark.parametrize(
    ("folded", "num_replay", "boundary"),
    [(62, 1, None), (63, 1, 64), (62, 4, 64), (64, 4, None), (60, 4, 64), (64, 64, 128), (0, 1, None), (126, 2, 128)],
)
def test_a_fold_saves_at_the_boundary_it_reaches(mode, folded, num_replay, boundary) -> None:
    assert rule(mode).in_fold(folded, num_replay) == boundary


def test_only_all_keeps_a_boundary_for_lying_on_the_interval() -> None:
    assert [rule(ALL).on_interval(count) for count in (448, 512, 1024)] == [False, True, True]
    assert not rule(ALIGN).on_interval(512)
