"""What a server says about itself: GET /health, /ready, /version, /v1/models, /metrics, /openapi.json."""

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gdn_jax import __version__
from gdn_jax.serving.http.errors import invalid
from gdn_jax.serving.http.metrics import CONTENT_TYPE
from gdn_jax.serving.http.middleware import send_json
from gdn_jax.serving.http.openapi import document
from gdn_jax.serving.http.records import record_of
from gdn_jax.serving.http.state import ServerState

_encode = msgspec.json.Encoder().encode


class Info:
    """One endpoint per method, each an ASGI callable."""

    def __init__(self, state: ServerState) -> None:
        """Speak for a server."""
        self._state = state
        self._openapi = _encode(document())

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say whether the process is alive: 200 also while it starts or drains, 503 once the engine died."""
        record_of(scope).path = "/health"
        phase = self._state.phase
        await send_json(_encode({"status": phase}), send, status=503 if phase == "stopped" else 200)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say whether requests are taken: 200, or 503 with what it waits for."""
        record_of(scope).path = "/ready"
        state = self._state
        if state.phase == "ready":
            await send_json(_encode({"status": "ready"}), send)
            return
        seconds = {"seconds": round(state.seconds, 1)} if state.phase == "starting" else {"live": state.num_live}
        await send_json(_encode({"status": state.phase, **seconds}), send, status=503, headers={"retry-after": "5"})

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say the version of this project."""
        record_of(scope).path = "/version"
        await send_json(_encode({"version": __version__}), send)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """List the names of the model; 503 until it can answer, as scripts wait for this."""
        record_of(scope).path = "/v1/models"
        cards = [self._card(name) for name in self._state.names]
        await send_json(_encode({"object": "list", "data": cards}), send)

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Describe one name."""
        record_of(scope).path = "/v1/models/{model}"
        name = Request(scope).path_params["model"]
        if name not in self._state.names:
            raise invalid(f"there is no model {name!r:.80} here", "model", status=404, code="model_not_found")
        await send_json(_encode(self._card(name)), send)

    def _card(self, name: str) -> dict[str, object]:
        state = self._state
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "gdn-jax",
            "root": state.names[0],
            "parent": None,
            "max_model_len": state.serving().max_model_len,
        }

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Expose the metrics."""
        record_of(scope).path = "/metrics"
        body = await self._state.metrics.render(self._state.backend)
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Describe every endpoint."""
        record_of(scope).path = "/openapi.json"
        await send_json(self._openapi, send)
