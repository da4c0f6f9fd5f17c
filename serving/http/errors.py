"""From errors to HTTP answers: the only map from the error tree to status codes, and the shape of an error's body.

| error | status | type |
| --- | --- | --- |
| RequestError and what derives from it | 400 | invalid_request_error |
| DuplicateRequestError | 409 | invalid_request_error |
| HTTPError: the server's own refusals | its own | its own |
| EngineError: the engine does not run | 503 | service_unavailable |
| anything else: a bug of ours | 500 | server_error |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gdn_jax.serving.core.errors import (
    DuplicateRequestError,
    EngineError,
    PromptTooLongError,
    RequestError,
    UnsupportedParameterError,
)

_INVALID = "invalid_request_error"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error as a client sees it.

    Attributes:
        status: HTTP status code.
        message: the rule, the value received, the remedy.
        kind: `type` of the body.
        parameter: `param` of the body: the field at fault.
        code: `code` of the body.
        headers: further headers of the answer.
    """

    status: int
    message: str
    kind: str = _INVALID
    parameter: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> bytes:
        """Return the body, in OpenAI's form."""
        # A message may quote a client's text, and half a surrogate pair has no bytes.
        message = self.message.encode(errors="replace").decode()
        parameter = None if self.parameter is None else self.parameter.encode(errors="replace").decode()
        error = {"message": message, "type": self.kind, "param": parameter, "code": self.code}
        return _encode({"error": error})


class HTTPError(Exception):
    """A refusal that the server itself decides on."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def invalid(message: str, parameter: str | None = None, *, status: int = 400, code: str = "invalid_value") -> HTTPError:
    """Return the refusal of a request that its sender has to change."""
    return HTTPError(Refusal(status=status, message=message, parameter=parameter, code=code))


def unsupported(message: str, parameter: str) -> HTTPError:
    """Return the refusal of a known parameter that asks for what this engine does not offer."""
    return invalid(message, parameter, code="unsupported_parameter")


def unauthorized() -> HTTPError:
    """Return the refusal of a request without one of the server's keys."""
    message = "this server asks for an API key; send one as the header Authorization: Bearer KEY"
    headers = {"www-authenticate": "Bearer"}
    return HTTPError(Refusal(status=401, message=message, code="invalid_api_key", headers=headers))


def too_many(message: str) -> HTTPError:
    """Return the refusal of a request that would wait too long."""
    headers = {"retry-after": "1"}
    return HTTPError(
        Refusal(status=429, message=message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    )


def unavailable(message: str, code: str) -> HTTPError:
    """Return the refusal of a request that comes while the server starts or stops."""
    headers = {"retry-after": "5"}
    return HTTPError(Refusal(status=503, message=message, kind="service_unavailable", code=code, headers=headers))


def timed_out(message: str, *, status: int = 504) -> HTTPError:
    """Return the end of a request that took too long."""
    return HTTPError(Refusal(status=status, message=message, kind="timeout_error", code="timeout"))


def failed(
    message: str = "the server failed on this request; the log has the reason under its x-request-id",
) -> Refusal:
    """Return the answer to a request that met a fault of the engine or a bug of ours."""
    return Refusal(status=500, message=message, kind="server_error", code="internal_error")


def refusal_of(error: BaseException) -> Refusal:
    """Return how an error is answered."""
    if isinstance(error, HTTPError):
        return error.refusal
    if isinstance(error, RequestError):
        return Refusal(
            status=409 if isinstance(error, DuplicateRequestError) else 400,
            message=str(error),
            parameter=error.parameter,
            code=_code(error),
        )
    if isinstance(error, EngineError):
        message = "the engine is not running; try again when the server is ready"
        return unavailable(message, "engine_stopped").refusal
    return failed()


def _code(error: RequestError) -> str:
    if isinstance(error, PromptTooLongError):
        return "context_length_exceeded"
    return "unsupported_parameter" if isinstance(error, UnsupportedParameterError) else "invalid_value"
