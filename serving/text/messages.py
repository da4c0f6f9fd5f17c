"""Chat messages brought into the one shape that templates of this family read.

What clients send varies; what a template sees does not:

* `content` is a string. Text parts are joined by a line break, for every role alike; other parts are refused by name.
  An assistant may leave it out or send null, which is the empty string.
* `developer` is `system`: the templates know no other name for it.
* `arguments` of a tool call is a mapping. A JSON string is parsed; an empty one and null mean no arguments.
* `reasoning` and `reasoning_content` are the same thing: an assistant's message has both or neither.
* Keys with null are left out, unknown keys are passed on.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from gdn_jax.serving.core.errors import InvalidParameterError, UnsupportedParameterError

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON has to write it, the backslash not itself escaped
ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize(messages: object) -> list[dict[str, object]]:
    """Return a client's list of messages, as decoded from JSON, in the shape above; the argument is not changed.

    Raises:
        InvalidParameterError: there is no message, or one has an unknown role or a wrongly typed or missing value.
        UnsupportedParameterError: a content part is not text, or a tool call is not a function call.
    """
    if not _is_list(messages) or not messages:
        raise InvalidParameterError(
            f"messages must be a list with at least one message; got {messages!r:.80}", parameter="messages"
        )
    listed = cast("Sequence[object]", messages)
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(listed)]


def merge_system(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return normalized messages with every system text in one leading message, in order, joined by a blank line."""
    system = [str(message["content"]) for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else others


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _object(value: object) -> Mapping[str, object]:
    """Return a JSON object as it is, anything else as an empty one, whose missing keys are then refused by name."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _normalize_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidParameterError(f"{where} must be an object; got {type(message).__name__}", parameter=where)
    known = {key: value for key, value in cast("Mapping[str, object]", message).items() if value is not None}
    role = known.get("role")
    if role not in ROLES:
        raise InvalidParameterError(
            f"{where}.role must be one of {', '.join(ROLES)}; got {role!r}", parameter=f"{where}.role"
        )
    if role == "developer":
        known["role"] = "system"
    if role == "assistant":
        known.setdefault("content", "")
        reasoning = known.get("reasoning_content", known.get("reasoning"))
        if reasoning is not None:
            text = _text(reasoning, f"{where}.reasoning_content")
            known |= {"reasoning": text, "reasoning_content": text}
    known["content"] = _text(known.get("content"), f"{where}.content")
    if "tool_calls" in known:
        known["tool_calls"] = _normalize_calls(known["tool_calls"], f"{where}.tool_calls")
    return known


def _text(content: object, where: str) -> str:
    """Return a string, or text parts joined."""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise InvalidParameterError(
            f"{where} must be a string or a list of text parts; got {type(content).__name__}", parameter=where
        )
    texts: list[str] = []
    for index, value in enumerate(cast("Sequence[object]", content)):
        part = {"text": value} if isinstance(value, str) else _object(value)
        kind, text = part.get("type", "text"), part.get("text")
        if kind != "text":
            raise UnsupportedParameterError(
                f"{where}[{index}] must be a text part, as this engine reads text only; got type {kind!r}. "
                "Leave it out or describe it in words",
                parameter=f"{where}[{index}]",
            )
        if not isinstance(text, str):
            raise InvalidParameterError(
                f"{where}[{index}].text must be a string; got {type(text).__name__}", parameter=f"{where}[{index}]"
            )
        texts.append(text)
    return "\n".join(texts)


def _normalize_calls(calls: object, where: str) -> list[dict[str, object]]:
    if not _is_list(calls):
        raise InvalidParameterError(f"{where} must be a list; got {type(calls).__name__}", parameter=where)
    normalized: list[dict[str, object]] = []
    for index, value in enumerate(cast("Sequence[object]", calls)):
        place = f"{where}[{index}]"
        call = _object(value)
        if (kind := call.get("type", "function")) != "function":
            raise UnsupportedParameterError(f"{place}.type must be 'function'; got {kind!r}", parameter=place)
        function = _object(call.get("function"))
        if not isinstance(function.get("name"), str):
            raise InvalidParameterError(f"{place}.function must have a name; got {value!r:.80}", parameter=place)
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        normalized.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return normalized


def _arguments(arguments: object, where: str) -> Mapping[str, object]:
    """Return the arguments of a call as a mapping."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(
                f"{where} must be JSON: {error}; got {arguments!r:.80}", parameter=where
            ) from None
        if _NUL.search(arguments):
            raise InvalidParameterError(
                f"{where} must not hold the character U+0000; got {arguments!r:.80}; leave it out", parameter=where
            )
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise InvalidParameterError(f"{where} must be a JSON object; got {arguments!r:.80}", parameter=where)
    return cast("Mapping[str, object]", parsed)
