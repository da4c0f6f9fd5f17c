"""The app: routes, and what stands around them."""

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gdn_jax.serving.http.chat import ChatCompletions
from gdn_jax.serving.http.completions import Completions
from gdn_jax.serving.http.info import Info
from gdn_jax.serving.http.middleware import Answering, Keys, Recording
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.http.tokens import Detokenize, Tokenize


class _Plain:
    """An ASGI callable that the router takes for one, which it does not do with a bound method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(state: ServerState) -> ASGIApp:
    """Return the app of a server."""
    info = Info(state)
    reads = {
        "/health": info.health,
        "/ready": info.ready,
        "/version": info.version,
        "/v1/models": info.models,
        "/v1/models/{model:path}": info.model,
        "/metrics": info.metrics,
        "/openapi.json": info.openapi,
    }
    writes = {
        "/v1/completions": Completions(state),
        "/v1/chat/completions": ChatCompletions(state),
        Tokenize.PATH: Tokenize(state),
        Detokenize.PATH: Detokenize(state),
    }
    routes = [Route(path, app, methods=["POST"]) for path, app in writes.items()]  # tried in order, so these first
    routes += [Route(path, _Plain(app), methods=["GET"]) for path, app in reads.items()]
    app: ASGIApp = Answering(Keys(Router(routes, redirect_slashes=False), state.config.keys()))
    if state.config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return Recording(app, state.metrics)
