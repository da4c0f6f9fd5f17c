"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gdn_jax.serving.http.backend import Backend, Tokens
from gdn_jax.serving.http.bodies import decode, read_body
from gdn_jax.serving.http.errors import invalid
from gdn_jax.serving.http.generation import Job, run
from gdn_jax.serving.http.logprobs import CompletionLogprobs, Echo, TokenNames
from gdn_jax.serving.http.records import record_of
from gdn_jax.serving.http.sampling import MAX_CHOICES, completion_params, refuse_unsupported
from gdn_jax.serving.http.schemas import CompletionRequest
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.http.streaming import Form, encode, new_id
from gdn_jax.serving.outputs import PositionLogprobs
from gdn_jax.serving.prompts import EncodedPrompt

PATH = "/v1/completions"
_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The endpoint."""

    def __init__(self, state: ServerState) -> None:
        """Serve for a server."""
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPError: it is refused.
            RequestError: the same, by the engine.
        """
        state, request = self._state, Request(scope, receive)
        record_of(scope).path = PATH
        backend = state.serving()
        body = await read_body(request, state)
        asked = decode(body, _decoder)
        state.check_model(asked.model)
        await run(_job(asked, backend, state), state, request, send)


def _job(asked: CompletionRequest, backend: Backend, state: ServerState) -> Job:
    refuse_unsupported(asked)
    params = completion_params(asked, state.defaults)
    prompts = as_prompts(asked.prompt)
    if len(prompts) * params.n > MAX_CHOICES:
        words = f"prompts times n must be at most {MAX_CHOICES}"
        raise invalid(f"{words}; got {len(prompts)} times {params.n}; send several requests", "n")
    answer_id = new_id("cmpl")

    def form(encoded: Sequence[EncodedPrompt]) -> CompletionForm:
        """Write answers to these prompts."""
        tokens = backend.get_tokenizer()
        echoed = [Echo(text_of(one, tokens), len(one.token_ids)) for one in encoded] if asked.echo else []
        return CompletionForm(
            answer_id=answer_id,
            model=state.names[0],
            num_choices=len(encoded) * params.n,
            echoed=[echo for echo in echoed for _ in range(params.n)],
            num_top=params.logprobs,
            tokens=tokens,
            names=TokenNames(tokens, as_ids=bool(asked.return_tokens_as_token_ids)),
        )

    return Job(
        answer_id=answer_id,
        num_prompts=len(prompts),
        encode=lambda: [backend.encode(prompt) for prompt in prompts],
        size=sum(map(len, prompts)),
        params=params,
        fields=asked,
        form=form,
        hides_tokens=bool(asked.echo) and asked.max_tokens == 0,
    )


def text_of(prompt: EncodedPrompt, tokens: Tokens) -> str:
    """Return a prompt's text, also if it came as token ids."""
    return tokens.decode(prompt.token_ids, skip_special_tokens=False) if prompt.text is None else prompt.text


def as_prompts(given: str | list[object]) -> list[str | list[int]]:
    """Return the prompts of the four forms: text, texts, token ids, lists of token ids.

    Raises:
        HTTPError: another form.
    """
    if isinstance(given, str):
        return [given]
    if given and _are_ids(given):
        return [cast("list[int]", given)]
    if not given or not (all(isinstance(item, str) for item in given) or all(map(_are_ids, given))):
        raise invalid(
            f"prompt must be a text, token ids, a list of texts, or lists of token ids; got {_short(given)}",
            "prompt",
        )
    return cast("list[str | list[int]]", given)


def _are_ids(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in cast("list[object]", value))


def _short(given: list[object]) -> str:
    """Quote a list without going down into it, as far as its client may have nested it."""
    return f"a list of {len(given)}, the first of type {type(given[0]).__name__}" if given else "an empty list"


@dataclass(kw_only=True, eq=False)
class CompletionForm(Form):
    """Writes text completions."""

    KIND = EVENT_KIND = "text_completion"
    NO_TEXT = b'""'
    SCORES_IN_CHOICES = True

    num_choices: int
    echoed: list[Echo]  # by choice what stands before its text; none at all where nothing does
    tokens: Tokens
    names: TokenNames

    def __post_init__(self) -> None:
        """Begin the offsets of each choice."""
        super().__post_init__()
        echoed = self.echoed or [Echo("", 0)] * self.num_choices
        self._logprobs = [CompletionLogprobs(self.names, self.tokens, self.num_top or 0, echo) for echo in echoed]

    def opening(self, tail: bytes) -> bytes:
        """Return nothing: a prompt that is echoed comes as a delta."""
        return b""

    def echo(self, choice: int) -> str | None:
        """Return the prompt's text, if it is asked for."""
        return self.echoed[choice].text if self.echoed else None

    def piece(self, text: str) -> bytes:
        """Return the text."""
        return encode(text)

    def one_event(self, choice: int, piece: bytes, logprobs: bytes, finish: bytes, tail: bytes) -> bytes:
        """Return a chunk."""
        parts = (
            self._head, b'{"index":%d,"text":' % choice, piece, b',"logprobs":', logprobs, b',"finish_reason":', finish,
            b"}]", tail, b"}\n\n",
        )  # fmt: skip
        return b"".join(parts)

    def logprobs(
        self, choice: int, token_ids: Sequence[int], reports: Sequence[PositionLogprobs | None]
    ) -> dict[str, object]:
        """Return parallel lists, whose offsets count on."""
        return self._logprobs[choice].write(token_ids, reports)

    def content(self, index: int, text: str) -> dict[str, object]:
        """Return the text."""
        return {"text": text}
