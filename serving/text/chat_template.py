"""Messages to prompt text by the template that was published with the model.

A template is a program from a model folder, so it runs in Jinja's immutable sandbox: no private attributes, no changes
to what it is given, no range beyond Jinja's limit. Its environment is the one that published templates are written for:
trimmed blocks, `break` and `continue`, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and
`generation` blocks, which mark an assistant's words for training and render as their content.

Message shapes are settled in `messages.py`. A template that takes no system message after the first (it raises, or
drops the text) gets all of them merged into the first; found out once, by rendering a sample.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gdn_jax.serving.core.errors import InvalidParameterError, RequestError, StartupError
from gdn_jax.serving.text.messages import merge_system, normalize
from gdn_jax.serving.text.tokenizer import read_json_object, special_token_texts

_RESERVED = ("messages", "tools", "add_generation_prompt")
_MARK = "\ue000\ue001"  # private-use characters: no template trims or rewrites them

# All that an expression over JSON values can raise inside the sandbox.
_TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """The chat templates of a model; stateless after construction, so any thread may render."""

    def __init__(self, sources: Mapping[str, str], *, variables: Mapping[str, str] | None = None) -> None:
        """Compile templates.

        Args:
            sources: template texts by name: "default", and "tool_use" if requests with tools have their own; may be
                empty, in which case every `render` is refused.
            variables: names that every render sees, e.g. `eos_token`.

        Raises:
            StartupError: a template cannot be compiled.
        """
        environment = _environment()
        self._variables = dict(variables or {})
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise StartupError(
                    f"the chat template {name!r} must be valid Jinja; line {error.lineno}: {error.message}. "
                    "Use the template that was published with the model"
                ) from error
        self._takes_later_system = {name for name, template in self._templates.items() if self._keeps_later(template)}

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ChatTemplate":
        """Read `chat_template.jinja`, else the key `chat_template` of tokenizer_config.json, one text or named ones.

        Raises:
            StartupError: a file is unreadable, the key has another shape, or a template cannot be compiled.
        """
        folder = Path(folder)
        config = read_json_object(folder / "tokenizer_config.json")
        sources: dict[str, str] = {}
        try:
            sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            sources = _named_templates(config.get("chat_template"))
        except (OSError, ValueError) as error:
            raise StartupError(f"{folder}/chat_template.jinja must be UTF-8 text: {error}. Fetch it again") from error
        return cls(sources, variables=special_token_texts(config))

    def render(
        self,
        messages: object,
        tools: object = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: the conversation as the client sent it; `messages.normalize` says what is taken.
            tools: a list of tool descriptions as the client sent it; None and an empty list are the same.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message, an assistant's, right after its content, so that the
                model goes on with it; then there is no generation prompt.
            variables: what else the template sees, e.g. `enable_thinking`.

        Raises:
            RequestError: there is no template, or it refuses or fails on these messages.
            InvalidParameterError: the messages, tools or variables have the wrong shape.
            UnsupportedParameterError: a message holds something other than text.
        """
        name, template = self._choose(with_tools=bool(tools))
        known = normalize(messages)
        if name not in self._takes_later_system:
            known = merge_system(known)
        if reserved := [key for key in variables or {} if key in _RESERVED]:
            raise InvalidParameterError(
                f"template variables must not be named {', '.join(_RESERVED)}; got {', '.join(reserved)}. "
                "Use the request's own field",
                parameter="chat_template_kwargs",
            )
        if continue_final_message:
            known[-1] = _marked(known[-1])
        scope = {
            **self._variables,
            **(variables or {}),
            "messages": known,
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run(template, scope)
        if not continue_final_message:
            return text
        before, mark, _ = text.rpartition(_MARK)
        if not mark:
            raise RequestError("the chat template leaves out the last message, so it cannot be continued")
        return before

    def next_turns(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        variables: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Return samples of what the next request's prompt may look like, for `turn_borders`.

        The conversation goes on with an answer, with and without reasoning, and then the user's next message; if there
        are tools, also with a call and its result. Samples that the template refuses are left out.
        """
        if messages and messages[-1].get("role") == "assistant":  # being continued: the answer is there
            answers: list[list[Mapping[str, object]]] = [[]]
        else:
            answers = [[_ANSWER], [{**_ANSWER, "reasoning_content": "b"}]]
        ways = [[*answer, {"role": "user", "content": "c"}] for answer in answers]
        if tools:
            ways += [[{**answer[0], "tool_calls": [_CALL]}, _RESULT] for answer in answers if answer]
        texts: list[str] = []
        for way in ways:
            try:
                texts.append(self.render([*messages, *way], tools, variables=variables))
            except RequestError:
                continue
        return texts

    def _choose(self, *, with_tools: bool) -> tuple[str, Template]:
        """Return the template for requests with or without tools."""
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "chat needs a chat template and the model folder has none; "
                "put its chat_template.jinja there, or send a plain prompt to the completions interface"
            )
        return name, self._templates[name]

    def _keeps_later(self, template: Template) -> bool:
        """Say whether a system message in the middle of a conversation reaches the text."""
        user = {"role": "user", "content": "a"}
        scope = {"messages": [user, {"role": "system", "content": _MARK}, user], "tools": None}
        try:
            return _MARK in _run(template, {**self._variables, **scope, "add_generation_prompt": True})
        except RequestError:
            return False


_ANSWER: dict[str, object] = {"role": "assistant", "content": "a"}
_CALL: dict[str, object] = {"type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT: dict[str, object] = {"role": "tool", "content": "c"}


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: a scope that renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # Jinja types neither table.
    filters = cast("dict[str, object]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _to_json
    functions = cast("dict[str, object]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models read it: characters as they are, keys in the order given."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _run(template: Template, scope: Mapping[str, object]) -> str:
    """Render, with whatever goes wrong in the template as a RequestError."""
    try:
        return template.render(scope)
    except _TEMPLATE_FAULTS as error:
        raise RequestError(f"the chat template refused these messages: {error}", parameter="messages") from error


def _named_templates(value: object) -> dict[str, str]:
    """Return the templates of tokenizer_config.json by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: dict[str, str] = {}
    for item in cast("list[object]", value) if isinstance(value, list) else [value]:
        entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        name, source = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            raise StartupError(
                "chat_template in tokenizer_config.json must be a text or a list of objects with name and template; "
                f"got {item!r:.80}. Use the file that was published with the model"
            )
        named[name] = source
    return named


def _checked_tools(tools: object) -> list[Mapping[str, object]] | None:
    """Return the tools as a list; None for an empty one, since templates only ask whether there are any."""
    if not tools:
        return None
    listed = cast("list[object]", tools) if isinstance(tools, list | tuple) else [None]
    if not all(isinstance(tool, Mapping) for tool in listed):
        raise InvalidParameterError(f"tools must be a list of objects; got {tools!r:.80}", parameter="tools")
    return cast("list[Mapping[str, object]]", list(listed))


def _marked(message: dict[str, object]) -> dict[str, object]:
    """Return an assistant's message with the mark behind its content."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        raise InvalidParameterError(
            "only an assistant's message without tool calls can be continued; the last message is "
            f"{'a tool call' if message.get('tool_calls') else 'of role ' + str(message['role'])}",
            parameter="continue_final_message",
        )
    return {**message, "content": f"{message['content']}{_MARK}"}
