"""What happens around every request, as plain ASGI callables: none of them costs anything per token but one call.

From the outside in: Recording (request ids, the log's line), CORS (the framework's), Answering (errors become bodies),
Keys.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gdn_jax.serving.http.bodies import ClientLeftError
from gdn_jax.serving.http.errors import Refusal, refusal_of, unauthorized, unavailable
from gdn_jax.serving.http.metrics import Metrics
from gdn_jax.serving.http.records import Record, fresh_hex, record_of

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NOT_NOW = frozenset({"starting", "draining"})  # codes of refusals with a status of 500 or more that are no failures
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json"})  # no key is asked for


class Recording:
    """Gives every request its id and its record, and closes the record at the end."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Wrap an app; `metrics` counts its requests."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else fresh_hex()
        record = Record(request_id=request_id, method=scope["method"], metrics=self._metrics)
        record.enter(scope)
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.close()


class Answering:
    """Turns whatever is raised before an answer began into an error's body; a bug of ours gets its trace in the log."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["app"] = self  # makes the router raise where it has no route, instead of answering in its own form
        try:
            await self._app(scope, receive, send)
        except ClientLeftError:
            record_of(scope).outcome = "abort"
        except asyncio.CancelledError:  # only a server that ends cancels, and nobody above would do more than log it
            if not record_of(scope).status:
                await send_refusal(unavailable("the server stopped; ask another one", "draining").refusal, scope, send)
        except HTTPException as error:
            allowed = (error.headers or {}).get("Allow", "")
            await send_refusal(_refusal_of_router(scope, error.status_code, allowed), scope, send)
        except Exception as error:  # the top of a request: a bug must end this one alone
            refusal = refusal_of(error)
            if refusal.status == 500:
                _LOG.exception("request %s failed", record_of(scope).request_id)
            if record_of(scope).status:
                raise  # an answer has begun; the server cuts the connection
            await send_refusal(refusal, scope, send)


class Keys:
    """Asks for an API key, except on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """Wrap an app; with no keys everything passes."""
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPError: 401, its key is none of ours.
        """
        if self._digests and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            digest = sha256(key.strip().encode()).digest()
            # every key is compared, whole, so that the time says nothing about which one came close
            matches = [compare_digest(digest, known) for known in self._digests]
            if scheme.lower() != "bearer" or not any(matches):
                raise unauthorized()
        await self._app(scope, receive, send)


async def send_refusal(refusal: Refusal, scope: Scope, send: Send) -> None:
    """Answer with an error, and close the connection if a body is still on its way that nobody will read."""
    record = record_of(scope)
    ours = refusal.status >= 500 and refusal.code not in _NOT_NOW
    record.outcome = record.outcome or ("error" if ours else "refused")
    headers = dict(refusal.headers)
    if not record.body_read and _has_body(scope):
        headers["connection"] = "close"
    await send_json(refusal.body(), send, status=refusal.status, headers=headers)


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"


async def send_json(body: bytes, send: Send, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Answer with JSON."""
    listed = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *listed]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def _refusal_of_router(scope: Scope, status: int, allowed: str) -> Refusal:
    if status == 405:
        message = f"{scope['path']!r:.80} takes {allowed}; got {scope['method']}"
        return Refusal(status=405, message=message, code="method_not_allowed", headers={"allow": allowed})
    message = f"there is nothing at {scope['path']!r:.80}; GET /openapi.json lists what there is"
    return Refusal(status=status, message=message, code="not_found")
