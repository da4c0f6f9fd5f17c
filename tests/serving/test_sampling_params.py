"""SamplingParams: what is accepted, what is refused, and what the refusal says."""

import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest

from gdn_jax.serving import sampling_params
from gdn_jax.serving.core.errors import InvalidParameterError, RequestError, UnsupportedParameterError
from gdn_jax.serving.runner import adjust, runner, sampling
from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams, UnknownParameterError

VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logit_bias": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
}
NUMBERS = ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"]
COUNTS = ["n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed"]
FLAGS = [
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]


def test_names_and_defaults_are_those_of_vllm() -> None:
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 128]),
        ("temperature", [0, 0.0, 1e-9, 0.7, 2, 1e30, np.float32(0.5)]),
        ("top_p", [1e-9, 0.5, 1, 1.0]),
        ("top_k", [-1, 0, 1, 20, 10**9]),
        ("min_p", [0, 0.05, 1]),
        ("seed", [None, 0, -1, 7, 2**63, 2**64 + 1, np.int64(7)]),
        ("stop", [None, "x", [], ["a", "bc"], ("a",)]),
        ("stop_token_ids", [None, [], [0, 5], (3,)]),
        ("max_tokens", [None, 1, 10**9]),
        ("min_tokens", [0, 16]),
        ("logprobs", [None, 0, 20]),
        ("presence_penalty", [0, -0.0, -2, 2, 0.5, np.float32(0.5)]),
        ("frequency_penalty", [0, -2, 2, 1.5]),
        ("repetition_penalty", [1, 1e-300, 1e300, 1.05]),
        ("prompt_logprobs", [None, 0, 20]),
        ("logit_bias", [None, {}, {0: -100, 319: 2.5, np.int64(4): 1e9}, dict.fromkeys(range(1024), 1)]),
        ("bad_words", [None, [], (), ["no", " way "], ("a",), ["a" * 256] * 128]),
        *[(flag, [True]) for flag in FLAGS],
    ],
)
def test_values_within_their_range_are_kept_as_given(name: str, values: list[object]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) is value


OUT_OF_RANGE = [
    *[("n", value) for value in (0, -1, 129)],
    *[("temperature", value) for value in (-1e-9, -1, 10**400)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, 2)],
    *[("top_k", value) for value in (-2, 1.5)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("max_tokens", value) for value in (0, -1)],
    *[("min_tokens", value) for value in (-1, 17)],
    *[("logprobs", value) for value in (-1, 21)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("repetition_penalty", value) for value in (0, -1)],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, b"x", {"a": 1})],
    *[("stop_token_ids", value) for value in (5, "5", [-1], [1.0], ["1"], [True], [None])],
    *[("bad_words", value) for value in ("word", [1], [""], [" \n"], ["a"] * 129)],
    *[("logit_bias", value) for value in ([1], "x", 3, {-1: 1}, {"5": 1}, {1.0: 1}, {True: 1}, {5: "1"}, {5: None})],
    *[("logit_bias", {5: value}) for value in (math.nan, math.inf, True)],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
]
WRONG_TYPE = [
    *[(name, value) for name in NUMBERS for value in ("1", True, None, [1.0], math.nan, math.inf, -math.inf, 1j)],
    *[(name, value) for name in COUNTS for value in ("1", True, False, 1.0, math.nan, [1])],
    *[(name, value) for name in FLAGS for value in (0, 1, "true", None)],
    *[(name, None) for name in ("n", "top_k", "min_tokens")],
]


@pytest.mark.parametrize(("name", "value"), [*OUT_OF_RANGE, *WRONG_TYPE])
def test_a_bad_value_is_refused_with_its_name_the_value_the_rule_and_a_remedy(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    statement, received, remedy = str(caught.value).split("; ")
    assert statement.startswith(f"{name} must be ")
    assert received.removeprefix("got ")[:18] == repr(value)[:18]
    assert remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ["x" * 10_000] * 1000 + [""]), ("bad_words", ["a", "b" * 257]), ("bad_words", ["a" * 10**6])],
)
def test_a_huge_value_does_not_flood_the_message(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
    ],
)
def test_what_the_engine_does_not_apply_is_refused_by_name_never_dropped(name: str, value: object) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"^{name} is not supported") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_stop_strings_need_text_to_look_for_them_in() -> None:
    with pytest.raises(InvalidParameterError, match="absent when detokenize is False"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop_strings == ()


def test_min_tokens_may_exceed_any_number_only_without_a_limit() -> None:
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    with pytest.raises(InvalidParameterError, match=r"at most max_tokens \(5\); got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("top_logprobs", "logprobs"), ("stops", "stop")],
)
def test_an_unknown_keyword_is_named_with_the_closest_known_one(given: str, meant: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"no parameter '{given}'; the closest known name is '{meant}'"):
        SamplingParams(**{given: 1})


def test_an_unknown_keyword_like_no_other_gets_the_list_of_known_ones() -> None:
    with pytest.raises(UnknownParameterError, match=r"'zzz'; the known names are n, presence_penalty, "):
        SamplingParams(zzz=1)


def test_an_unknown_keyword_is_both_a_type_error_and_a_request_error() -> None:
    assert issubclass(UnknownParameterError, TypeError)
    assert issubclass(UnknownParameterError, RequestError)


def test_positional_values_are_refused_with_the_way_to_write_them() -> None:
    with pytest.raises(UnknownParameterError, match="keywords only; got 1 positional"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_the_signature_stays_readable_for_editors() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == VLLM_DEFAULTS


def test_a_changed_copy_is_checked_and_leaves_the_original_alone() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert dataclasses.replace(params, temperature=0.0) == SamplingParams(temperature=0.0, stop=["a"])
    assert params.temperature == 0.5
    with pytest.raises(InvalidParameterError, match="top_p"):
        dataclasses.replace(params, top_p=7)


def test_params_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


def test_params_survive_copying_and_pickling() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_temperatures_that_float32_logits_cannot_bear_mean_greedy(temperature: float, *, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))])
def test_stop_strings_are_a_tuple_however_they_were_given(stop: object, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


def test_the_kinds_of_output_are_those_of_vllm() -> None:
    assert {kind.name: kind.value for kind in RequestOutputKind} == {"CUMULATIVE": 0, "DELTA": 1, "FINAL_ONLY": 2}


@pytest.mark.parametrize("value", [None, 1, "DELTA"])
def test_an_output_kind_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameterError, match="output_kind must be a RequestOutputKind"):
        SamplingParams(output_kind=value)  # pyright: ignore[reportArgumentType]


def test_the_device_side_has_the_same_limits_which_it_may_not_import() -> None:
    assert sampling._GREEDY_BELOW == sampling_params.GREEDY_BELOW
    assert runner.MAX_LOGPROBS == sampling_params.MAX_LOGPROBS
    assert adjust.MAX_BIASES == sampling_params.MAX_BIASES
    assert adjust.MAX_WORDS == 2 * sampling_params.MAX_BAD_WORDS  # each with and without a blank before it
