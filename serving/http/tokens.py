"""POST /tokenize and POST /detokenize: the engine's own tokenizer and chat template, without generating."""

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.bodies import decode, read_body
from gdn_jax.serving.http.chat import template_options
from gdn_jax.serving.http.errors import invalid
from gdn_jax.serving.http.generation import INLINE_CHARACTERS
from gdn_jax.serving.http.logprobs import TokenNames
from gdn_jax.serving.http.middleware import send_json
from gdn_jax.serving.http.records import record_of
from gdn_jax.serving.http.schemas import DetokenizeRequest, TokenizeRequest
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.prompts import EncodedPrompt

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode


class Tokenize:
    """Text or a conversation to token ids, as generation would read them."""

    PATH = "/tokenize"

    def __init__(self, state: ServerState) -> None:
        """Serve for a server."""
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPError: it is refused.
            RequestError: the text or the conversation cannot be encoded.
        """
        record_of(scope).path = self.PATH
        backend, body = await _read(self._state, scope, receive)
        asked = decode(body, _tokenize)
        self._state.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("send one of prompt and messages", "prompt")
        encode = _encoder(asked, backend, self._state)
        try:
            encoded = await asyncio.to_thread(encode) if len(body) > INLINE_CHARACTERS else encode()
        except RecursionError:
            raise invalid("the request must not be nested so deeply; flatten it") from None
        names = TokenNames(backend.get_tokenizer(), as_ids=False)
        answer = {
            "count": len(encoded.token_ids),
            "max_model_len": backend.max_model_len,
            "tokens": encoded.token_ids,
            "token_strs": list(map(names.name, encoded.token_ids)) if asked.return_token_strs else None,
        }
        await send_json(_encode(answer), send)


class Detokenize:
    """Token ids to text, special tokens shown."""

    PATH = "/detokenize"

    def __init__(self, state: ServerState) -> None:
        """Serve for a server."""
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPError: it is refused.
            RequestError: a token id lies outside the vocabulary.
        """
        record_of(scope).path = self.PATH
        backend, body = await _read(self._state, scope, receive)
        asked = decode(body, _detokenize)
        self._state.check_model(asked.model)
        ids = backend.encode(asked.tokens).token_ids if asked.tokens else []
        text = backend.get_tokenizer().decode(ids, skip_special_tokens=False)
        await send_json(_encode({"prompt": text}), send)


async def _read(state: ServerState, scope: Scope, receive: Receive) -> tuple[Backend, bytes]:
    backend = state.serving()
    return backend, await read_body(Request(scope, receive), state)


def _encoder(asked: TokenizeRequest, backend: Backend, state: ServerState) -> Callable[[], EncodedPrompt]:
    text = asked.prompt
    if text is not None:
        return lambda: backend.encode(text)
    options = template_options(asked, state.template_variables)
    return lambda: backend.render(asked.messages, **options)
