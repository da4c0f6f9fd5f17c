"""Intake: numbers, names and seeds of requests, and what the model cannot take."""

from collections.abc import Iterator
from dataclasses import replace

import jaxtyping
import pytest
from oracles.quick_engine import lasting, make_parts

from gdn_jax import SamplingParams
from gdn_jax.serving.core.errors import InvalidParameterError, PromptTooLongError
from gdn_jax.serving.engine_types import EngineRequest
from gdn_jax.serving.intake import Intake, Options, one_per_prompt
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.text.tokenizer import GenerationDefaults

PROMPT = EncodedPrompt(text=None, token_ids=[5, 6, 7], turn_borders=(2,))


@pytest.fixture
def intake() -> Intake:
    return Intake(make_parts(max_model_len=64), seed=3)


@pytest.fixture
def _no_type_checker() -> Iterator[None]:
    """As for a user: the code itself answers a value of the wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def take(intake: Intake, name: str | None = None, **params: object) -> tuple[str, list[EngineRequest]]:
    asked = SamplingParams(**params)  # pyright: ignore[reportArgumentType]
    collector, requests = intake.take(PROMPT, asked, Options(), name)
    assert collector.request_ids == tuple(request.request_id for request in requests)
    return collector.name, requests


def test_no_name_of_a_callers_can_be_the_id_of_another_request(intake: Intake) -> None:
    taken = [take(intake, name, n=3) for name in (None, "0", "1-1", "1.1", "2", "0", None, "1")]
    ids = [request.request_id for _, requests in taken for request in requests]
    assert len(set(ids)) == len(ids)
    assert [name for name, _ in taken] == ["0", "0", "1-1", "1.1", "2", "0", "6", "1"]
    assert [request.name for _, requests in taken for request in requests][3:6] == ["0"] * 3


def test_siblings_wait_for_the_first_and_draw_from_different_seeds(intake: Intake) -> None:
    _, requests = take(intake, "mine", n=3, seed=9)
    first = requests[0].request_id
    assert [request.leader for request in requests] == [None, first, first]
    assert len({request.seed for request in requests}) == 3
    _, again = take(intake, n=3, seed=9)
    assert [request.seed for request in again] == [request.seed for request in requests]
    assert take(intake, seed=9)[1][0].seed == requests[0].seed


def test_the_first_completion_alone_scores_the_prompt_for_all_of_them(intake: Intake) -> None:
    _, requests = take(intake, n=3, prompt_logprobs=2, logprobs=4, max_tokens=5)
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    assert [(request.params.logprobs, request.params.max_tokens) for request in requests] == [(4, 5)] * 3


def test_requests_without_a_seed_draw_from_the_engines_in_turn(intake: Intake) -> None:
    drawn = [take(intake)[1][0].seed for _ in range(4)]
    assert len(set(drawn)) == 4
    other = Intake(make_parts(), seed=3)
    take(other, seed=1)  # brings its own: takes no turn
    assert [take(other)[1][0].seed for _ in range(4)] == drawn
    assert take(Intake(make_parts(), seed=4))[1][0].seed != drawn[0]


def test_max_tokens_is_what_the_context_leaves_unless_given(intake: Intake) -> None:
    assert take(intake, max_tokens=None)[1][0].max_tokens == 61
    assert take(intake, max_tokens=5)[1][0].max_tokens == 5
    with pytest.raises(PromptTooLongError, match=r"shorter than max_model_len \(64\); got 64"):
        intake.take(EncodedPrompt(text=None, token_ids=[1] * 64), lasting(), Options())
    assert intake.take(EncodedPrompt(text=None, token_ids=[1] * 63), SamplingParams(max_tokens=None), Options())


@pytest.mark.parametrize(
    ("limit", "blocks", "remedy"),
    [
        (64, 200, "shorten it, or raise max_model_len"),
        (4096, 1100, "shorten it: that is the model's own limit"),
        (64, 17, "shorten it, or give the KV pool more memory, which max_model_len fills"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_only_what_can_help(limit: int, blocks: int, remedy: str) -> None:
    intake = Intake(make_parts(max_model_len=limit, blocks=blocks), seed=3)
    with pytest.raises(PromptTooLongError) as caught:
        intake.take(EncodedPrompt(text=None, token_ids=[1] * limit), lasting(), Options())
    assert str(caught.value) == f"a prompt must be shorter than max_model_len ({limit}); got {limit} tokens; {remedy}"


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_a_token_outside_the_vocabulary_is_refused_by_number(intake: Intake, name: str) -> None:
    def asked(*token_ids: int) -> object:
        return list(token_ids) if name == "stop_token_ids" else dict.fromkeys(token_ids, 1.0)

    assert take(intake, **{name: asked(319)})
    with pytest.raises(InvalidParameterError, match=rf"{name} must be in 0\.\.319.*got 320") as caught:
        take(intake, **{name: asked(3, 320)})
    assert caught.value.parameter == name


def test_every_completion_gets_the_tokens_of_its_bad_words(intake: Intake) -> None:
    encode = make_parts().tokenizer.encode
    _, requests = take(intake, n=2, bad_words=["ab"])
    assert [request.bad_words for request in requests] == [(tuple(encode("ab")), tuple(encode(" ab")))] * 2
    assert take(intake)[1][0].bad_words == ()


def test_what_the_model_recommends_holds_for_penalties_too() -> None:
    recommended = GenerationDefaults(
        temperature=0.7, top_k=20, repetition_penalty=1.05, presence_penalty=1.5, frequency_penalty=0.5
    )
    assert Intake(replace(make_parts(), defaults=recommended), seed=3).default_params() == SamplingParams(
        temperature=0.7, top_k=20, repetition_penalty=1.05, presence_penalty=1.5, frequency_penalty=0.5
    )


@pytest.mark.usefixtures("_no_type_checker")
@pytest.mark.parametrize("name", [5, b"x", ["a"]])
def test_a_name_that_is_no_text_is_refused(intake: Intake, name: object) -> None:
    with pytest.raises(InvalidParameterError, match="request_id must be a str"):
        intake.take(PROMPT, lasting(), Options(), name)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("_no_type_checker")
@pytest.mark.parametrize("params", [{"max_tokens": 3}, [lasting()], "greedy", None])
def test_sampling_parameters_that_are_none_are_refused_by_name(intake: Intake, params: object) -> None:
    with pytest.raises(
        InvalidParameterError, match=f"sampling_params must be .* got {type(params).__name__}"
    ) as caught:
        intake.take(PROMPT, params, Options())  # pyright: ignore[reportArgumentType]
    assert caught.value.parameter == "sampling_params"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Options(**options)  # pyright: ignore[reportArgumentType]
    assert caught.value.parameter == name


def test_what_is_given_per_prompt_has_one_entry_per_prompt() -> None:
    assert one_per_prompt("priority", (1, 2), 2) == [1, 2]
    with pytest.raises(InvalidParameterError, match=r"one entry per prompt \(2\); got 3"):
        one_per_prompt("priority", [1, 2, 3], 2)


def test_options_reach_the_engines_request(intake: Intake) -> None:
    _, (request,) = intake.take(PROMPT, lasting(4), Options(priority=-2, cache_salt="me"))
    assert (request.priority, request.cache_salt, request.turn_borders) == (-2, "me", (2,))
