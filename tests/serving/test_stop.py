"""Stop strings: streamed text ends where the whole text ends, and nothing of a stop string is sent early."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdn_jax.serving.core.errors import InvalidParameterError
from gdn_jax.serving.text.stop import StopChecker, StopOutput

# Two letters make matches, overlaps and near misses common.
texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def whole(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """Cut the whole text at the first character that completes a stop string: the definition, spelled out."""
    for end in range(1, len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return text[: end if include else end - len(candidate)], candidate
    return text, None


def stream(parts: list[str], checker: StopChecker) -> tuple[str, str | None]:
    """Push the parts up to a match; return what was released, and the match."""
    released = ""
    for part in parts:
        output = checker.push(part)
        released += output.text
        if output.matched is not None:
            return released, output.matched
    return released + checker.flush(), None


def split(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(borders)]


@settings(deadline=None)
@given(text=texts, stop=stop_lists, cuts=st.lists(st.integers(0, 24)), include=st.booleans())
@example(text="aab", stop=["ab", "b"], cuts=[1, 2], include=False)
@example(text="aab", stop=["b", "ab"], cuts=[1, 2], include=False)
@example(text="aaab", stop=["aab"], cuts=[1, 2, 3], include=False)
def test_streamed_text_ends_where_the_whole_text_ends(
    text: str, stop: list[str], cuts: list[int], *, include: bool
) -> None:
    checker = StopChecker(stop, include_stop_string=include)
    assert stream(split(text, cuts), checker) == whole(text, stop, include=include)


@settings(deadline=None)
@given(text=texts, stop=stop_lists)
def test_exactly_the_text_that_may_still_become_part_of_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    released = ""
    for end, character in enumerate(text, 1):
        output = checker.push(character)
        released += output.text
        if output.matched is not None:
            break
        starts = [n for candidate in stop for n in range(1, len(candidate)) if text[:end].endswith(candidate[:n])]
        assert released == text[: end - max(starts, default=0)]


def test_a_stop_string_over_several_pieces_is_never_sent() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.push(part).text for part in ("a", "b</", "en", "d")] == ["a", "b", "", ""]
    assert checker.push(">tail") == StopOutput(text="", matched="</end>")
    assert checker.stopped


def test_a_near_miss_is_sent_in_full_as_soon_as_it_is_one() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.push(part).text for part in ("b</", "en", "x")] == ["b", "", "</enx"]
    assert not checker.stopped


def test_a_near_miss_at_the_end_is_flushed_once() -> None:
    checker = StopChecker(["</end>"])
    assert checker.push("b</en").text == "b"
    assert [checker.flush(), checker.flush()] == ["</en", ""]


def test_a_match_inside_a_failed_longer_start_is_found() -> None:
    assert stream(list("aabaaabx"), StopChecker(["aabaab", "aaab"])) == ("aab", "aaab")


@pytest.mark.parametrize(("stop", "text"), [(["\n", "\n\n"], "a"), (["\n\n", "\n"], "a"), (["bc", "abcd"], "a")])
def test_the_string_completed_first_counts(stop: list[str], text: str) -> None:
    source = "a\n\nz" if "\n" in stop else "abcd"
    first = min(stop, key=len)
    assert stream([source], StopChecker(stop)) == (text, first)


@pytest.mark.parametrize(("stop", "expected"), [(["bc", "abc"], ("xa", "bc")), (["abc", "bc"], ("x", "abc"))])
def test_of_two_completed_by_one_character_the_first_listed_counts(stop: list[str], expected: tuple[str, str]) -> None:
    assert stream(["xab", "cz"], StopChecker(stop)) == expected


def test_the_stop_string_is_part_of_the_text_when_asked() -> None:
    checker = StopChecker(["STOP"], include_stop_string=True)
    assert checker.push("aST") == StopOutput(text="a", matched=None)
    assert checker.push("OPb") == StopOutput(text="STOP", matched="STOP")


def test_after_a_match_nothing_is_released() -> None:
    checker = StopChecker(["b"])
    checker.push("ab")
    assert checker.push("more") == StopOutput(text="", matched="b")
    assert checker.flush() == ""


def test_without_stop_strings_everything_is_sent_at_once() -> None:
    checker = StopChecker([])
    assert [checker.push(part).text for part in ("a", "", "bc")] == ["a", "", "bc"]
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="must not be empty") as caught:
        StopChecker(["a", ""])
    assert caught.value.parameter == "stop"


def test_a_long_stop_string_full_of_near_misses_costs_no_more_a_character() -> None:
    def seconds(length: int) -> float:
        start = time.perf_counter()
        checker = StopChecker(["a" * length + "b"])
        for _ in range(1_000):
            checker.push("a")
        return time.perf_counter() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (10, 2_000))
    # comparing every start again would cost 200 times as much; building the automaton is in the measurement
    assert long < 20 * short
