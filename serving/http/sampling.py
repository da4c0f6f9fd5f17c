"""From a request's fields to SamplingParams. What the engine does not offer is refused by name, never ignored."""

from collections.abc import Mapping
from dataclasses import replace

from gdn_jax.serving.core.errors import RequestError
from gdn_jax.serving.http.errors import invalid, unsupported
from gdn_jax.serving.http.schemas import NEUTRAL, REMEDIES, ChatCompletionRequest, CompletionRequest, SamplingFields
from gdn_jax.serving.sampling_params import SamplingParams

COMPLETION_TOKENS = 16  # what /v1/completions generates unless told otherwise, as elsewhere
MAX_CHOICES = 1024  # of one request: prompts times n
_MAX_STOPS = 256  # each is watched for at every character
_MAX_STOP_CHARACTERS = 4096
_MAX_DIGITS = 19  # of a token id

# Fields with the same name and meaning in SamplingParams; left out, the model's own recommendation holds.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "bad_words", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    "prompt_logprobs",
)  # fmt: skip


def refuse_unsupported(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Refuse fields that ask for what this engine does not offer.

    Raises:
        HTTPError: names the field.
    """
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is None or (isinstance(request, CompletionRequest) and name == "echo"):
            continue
        # 1 == True in Python, and a client that sends one for the other means something else
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
            allowed = " or ".join([*(repr(other) for other in neutral), "null"])
            remedy = REMEDIES.get(name, "leave it out")
            raise unsupported(f"{name} is not supported, except at {allowed}; got {value!r:.80}; {remedy}", name)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return how a completion is sampled.

    Args:
        request: of /v1/completions.
        defaults: what the model recommends.

    Raises:
        RequestError: a value out of range, or one that the engine does not offer.
        HTTPError: two values that contradict each other.
    """
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and max_tokens == 0:
        max_tokens = 1  # the engine always generates; the answer leaves this token out
    chosen: dict[str, object] = {"logprobs": request.logprobs, "max_tokens": max_tokens}
    if request.echo and request.prompt_logprobs is None:
        chosen["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, chosen, {})


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return how an answer is sampled; the rest as for `completion_params`."""
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid(
            f"max_tokens and max_completion_tokens mean the same and must be equal; got {request.max_tokens} and "
            f"{request.max_completion_tokens}; send one",
            "max_completion_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs must come with logprobs: true; set it, or leave both out", "top_logprobs")
    chosen = {
        "max_tokens": next(iter(limits), None),
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
    }
    names = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _params(request, defaults, chosen, names)


def _params(
    request: SamplingFields, defaults: SamplingParams, chosen: Mapping[str, object], names: Mapping[str, str]
) -> SamplingParams:
    """Return the defaults with what was given; `names` are the fields' names in errors where they are not the same."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options must come with stream: true; set it, or leave both out", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs must come without stream; leave one of them out", "prompt_logprobs")
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    _check_stops(request)
    if request.logit_bias is not None:
        given["logit_bias"] = _biases(request.logit_bias)
    try:
        return replace(defaults, **{**given, **chosen})
    except RequestError as error:
        name = error.parameter or ""
        if name not in names or name in given:
            raise
        raise type(error)(f"{names[name]}: {error}", parameter=names[name]) from None


def _check_stops(request: SamplingFields) -> None:
    """Bound the work that a request can ask of every step."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARACTERS for stop in stops):
        words = f"stop must be at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARACTERS} characters"
        raise invalid(f"{words}; got {len(stops)}, the longest of {max(map(len, stops))}; leave some out", "stop")
    if len(request.stop_token_ids or ()) > _MAX_STOPS:
        words = f"stop_token_ids must be at most {_MAX_STOPS} ids"
        raise invalid(f"{words}; got {len(request.stop_token_ids or ())}; leave some out", "stop_token_ids")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    """Return biases by token id; JSON has only text for keys."""
    if wrong := [name for name in biases if not (name.isascii() and name.removeprefix("-").isdigit())]:
        raise invalid(f"logit_bias must have token ids for keys; got {wrong[0]!r:.80}; leave it out", "logit_bias")
    if wrong := [name for name in biases if len(name) > _MAX_DIGITS]:
        raise invalid(f"logit_bias must have ids of the vocabulary for keys; got {wrong[0]!r:.80}", "logit_bias")
    return {int(name): value for name, value in biases.items()}
