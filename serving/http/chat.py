"""POST /v1/chat/completions.

Tools are rendered into the prompt. What the model answers is `content` as it stands: calls and reasoning in it are not
taken apart yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.bodies import decode, read_body
from gdn_jax.serving.http.errors import invalid
from gdn_jax.serving.http.generation import Job, run
from gdn_jax.serving.http.logprobs import TokenNames, chat_entries
from gdn_jax.serving.http.records import record_of
from gdn_jax.serving.http.sampling import chat_params, refuse_unsupported
from gdn_jax.serving.http.schemas import ChatCompletionRequest, TokenizeRequest
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.http.streaming import Form, encode, new_id
from gdn_jax.serving.outputs import PositionLogprobs
from gdn_jax.serving.prompts import EncodedPrompt

PATH = "/v1/chat/completions"
_decoder = msgspec.json.Decoder(ChatCompletionRequest)


class ChatCompletions:
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
        await run(_job(asked, backend, state, len(body)), state, request, send)


def _job(asked: ChatCompletionRequest, backend: Backend, state: ServerState, size: int) -> Job:
    refuse_unsupported(asked)
    params = chat_params(asked, state.defaults)
    answer_id = new_id("chatcmpl")

    def form(_: Sequence[EncodedPrompt]) -> ChatForm:
        """Write answers."""
        tokens = backend.get_tokenizer()
        return ChatForm(
            answer_id=answer_id,
            model=state.names[0],
            num_choices=params.n,
            num_top=params.logprobs,
            names=TokenNames(tokens, as_ids=bool(asked.return_tokens_as_token_ids)),
        )

    options = template_options(asked, state.template_variables)
    return Job(
        answer_id=answer_id,
        num_prompts=1,
        encode=lambda: [backend.render(asked.messages, **options)],
        size=size,
        params=params,
        fields=asked,
        form=form,
    )


def template_options(
    asked: ChatCompletionRequest | TokenizeRequest, variables: Mapping[str, object]
) -> dict[str, object]:
    """Return how a conversation is rendered.

    Args:
        asked: the request.
        variables: names for the template that it may override.

    Raises:
        HTTPError: options that contradict each other, or a tool that is no function.
    """
    if asked.add_generation_prompt and asked.continue_final_message:
        raise invalid(
            "add_generation_prompt and continue_final_message must not both be true: one opens a new turn, the other "
            "goes on with the last; leave one out",
            "continue_final_message",
        )
    for index, tool in enumerate(asked.tools or []):
        if tool.get("type") != "function" or not _has_name(tool.get("function")):
            raise invalid(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}; got {tool!r:.80}',
                f"tools[{index}]",
            )
    return {
        "tools": asked.tools,
        "add_generation_prompt": asked.add_generation_prompt is not False,
        "continue_final_message": bool(asked.continue_final_message),
        "chat_template_kwargs": {**variables, **(asked.chat_template_kwargs or {})},
    }


def _has_name(function: object) -> bool:
    return isinstance(function, dict) and isinstance(cast("dict[str, object]", function).get("name"), str)


@dataclass(kw_only=True, eq=False)
class ChatForm(Form):
    """Writes chat completions."""

    KIND = "chat.completion"
    EVENT_KIND = "chat.completion.chunk"
    NO_TEXT = b""
    SCORES_IN_CHOICES = False

    num_choices: int
    names: TokenNames

    def opening(self, tail: bytes) -> bytes:
        """Return the event that names the speaker of each choice."""
        role = b'"role":"assistant","content":""'
        return b"".join(self.one_event(choice, role, b"null", b"null", tail) for choice in range(self.num_choices))

    def piece(self, text: str) -> bytes:
        """Return the change of a message."""
        return b'"content":' + encode(text)

    def one_event(self, choice: int, piece: bytes, logprobs: bytes, finish: bytes, tail: bytes) -> bytes:
        """Return a chunk."""
        parts = (
            self._head, b'{"index":%d,"delta":{' % choice, piece, b'},"logprobs":', logprobs, b',"finish_reason":',
            finish, b"}]", tail, b"}\n\n",
        )  # fmt: skip
        return b"".join(parts)

    def logprobs(
        self, choice: int, token_ids: Sequence[int], reports: Sequence[PositionLogprobs | None]
    ) -> dict[str, object]:
        """Return entries per token."""
        return {"content": chat_entries(token_ids, reports, self.num_top or 0, self.names), "refusal": None}

    def content(self, index: int, text: str) -> dict[str, object]:
        """Return the message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}
