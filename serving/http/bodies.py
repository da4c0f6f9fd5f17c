"""A request's body: read within its limits, decoded into its type, every complaint naming the field at fault."""

import asyncio
import re
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from gdn_jax.serving.http.errors import HTTPError, invalid, timed_out
from gdn_jax.serving.http.records import record_of
from gdn_jax.serving.http.state import ServerState

_PLACE = re.compile(r"(?P<words>.*?)(?: - at `(?:key in )?\$(?P<place>.*)`)?", flags=re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", flags=re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_TYPES = re.compile(r"Expected `(?P<wanted>.*?)`, got `(?P<got>.*?)`")


class ClientLeftError(Exception):
    """The client closed the connection before its body was whole; nobody is there to answer."""


async def read_body(request: Request, state: ServerState) -> bytes:
    """Return the whole body.

    Args:
        request: a request nobody has read from.
        state: of the server, whose settings say how large it may be and how long it may take.

    Raises:
        HTTPError: it is larger than the limit (413), says that it is no JSON or is compressed (415), does not arrive in
            time (408), or the server stops meanwhile (503).
        ClientLeftError: the client is gone.
    """
    limit, timeout = state.config.max_body_bytes, state.config.body_timeout
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(f"content-type must be application/json; got {kind!r}", status=415, code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if coding != "identity":
        message = f"content-encoding must be identity; got {coding!r:.80}; send the body as it is"
        raise invalid(message, status=415, code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    try:
        with state.reading():
            async with asyncio.timeout(timeout):
                body = await _read(request.receive, limit)
    except TimeoutError:
        raise timed_out(f"the request's body must arrive within {timeout:g} s; send it faster", status=408) from None
    record_of(request.scope).body_read = True
    return body


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = cast("bytes", message.get("body", b""))
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> HTTPError:
    message = (
        f"a request's body must be at most {limit} bytes; send less, or start the server with a larger max_body_mib"
    )
    return invalid(message, status=413, code="body_too_large")


def decode[Body: msgspec.Struct](body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Return a body as its type.

    Raises:
        HTTPError: it is no JSON, a field has the wrong type, is unknown or missing, or a text holds U+0000.
    """
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body must be a JSON object in UTF-8; {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body must not be nested so deeply; flatten it", code="invalid_json") from None
    if rb"\u0000" in body and (place := _place_of_nul(msgspec.structs.asdict(request))) is not None:
        raise invalid(f"{place} must not hold the character U+0000; leave it out", place)
    return request


def _named(text: str) -> HTTPError:
    """Turn a complaint of the decoder into one that names the field."""
    match = _PLACE.fullmatch(text)
    words, place = (text, "") if match is None else (match["words"], (match["place"] or "").removeprefix("."))
    if unknown := _UNKNOWN.fullmatch(words):
        name = f"{place}.{unknown['name']}".removeprefix(".")
        message = f"{name!r:.80} is not a parameter of this endpoint; check its spelling, or leave it out"
        return invalid(message, name[:80], code="unknown_parameter")
    if missing := _MISSING.fullmatch(words):
        name = f"{place}.{missing['name']}".removeprefix(".")
        return invalid(f"{name} is required; add it", name, code="missing_parameter")
    types = _TYPES.fullmatch(words)
    rule = words if types is None else f"must be {types['wanted'].replace(' | ', ' or ')}; got {types['got']}"
    return invalid(f"{place or 'the body'} {rule}", place or None, code="invalid_type")


def _place_of_nul(fields: object) -> str | None:
    """Return where a text holds U+0000; walks without recursion, as clients choose the depth."""
    left: list[tuple[str, object]] = [("", fields)]
    while left:
        place, value = left.pop()
        if isinstance(value, str):
            if "\0" in value:
                return place
        elif isinstance(value, dict):
            for key, item in cast("dict[object, object]", value).items():
                name = str(key)
                if "\0" in name:
                    return place or "a name"
                left.append((f"{place}.{name}" if place else name, item))
        elif isinstance(value, list):
            left += [(f"{place}[{index}]", item) for index, item in enumerate(cast("list[object]", value))]
    return None
