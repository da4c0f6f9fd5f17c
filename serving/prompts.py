"""From what a caller hands over to checked token ids: text, ids, dicts of either, conversations."""

from collections.abc import Iterable, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, cast

from gdn_jax.serving.core.errors import InvalidParameterError, InvalidPromptError, UnsupportedParameterError
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer
from gdn_jax.serving.text.turn_borders import turn_borders

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Mapping[str, object]
_TEMPLATE_OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt ready to run.

    Attributes:
        text: None if it came as token ids.
        token_ids: at least one, all in the vocabulary.
        turn_borders: token counts up to which the next turn of a conversation may share it.
    """

    text: str | None
    token_ids: list[int]
    turn_borders: tuple[int, ...] = ()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a str, a dict, and a sequence of integers are one prompt each.

    Raises:
        InvalidPromptError: neither a prompt nor a sequence of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_series(prompts):
        raise InvalidPromptError(
            f"prompts must be text, token ids, a dict, or a list of such; got {type(prompts).__name__}",
            parameter="prompts",
        )
    listed = list(cast("Sequence[Prompt]", prompts))
    if listed and not (hasattr(listed[0], "__len__") and _is_series(listed[0])):
        return [cast("list[int]", listed)]  # of numbers, or of something `read` will refuse by name
    return listed


def as_conversations(messages: object) -> list[object]:
    """Return a list of conversations: a sequence that opens with a message is one.

    Raises:
        InvalidPromptError: neither a conversation nor a list of conversations; each is checked when it is rendered.
    """
    listed = _as_messages(messages)
    return [listed] if isinstance(listed[0], Mapping) else listed


def _as_messages(messages: object) -> list[object]:
    """Return a non-empty list of whatever a caller gave as messages."""
    if isinstance(messages, str | Mapping) or not _is_series(messages):
        raise InvalidPromptError(
            "messages must be a list of messages, each a dict with 'role' and 'content'; got "
            f"{type(messages).__name__}",
            parameter="messages",
        )
    listed = list(cast("Iterable[object]", messages))
    if not listed:
        raise InvalidPromptError("messages must hold at least one message; got none", parameter="messages")
    return listed


def _is_series(value: object) -> bool:
    """Return whether a value can be walked and may mean something.

    Raw bytes are neither text nor token ids, and what has no order of its own is no prompt.
    """
    if isinstance(value, str):  # NumPy's too, which has an `ndim` of 0
        return True
    if isinstance(value, bytes | bytearray | memoryview | AbstractSet | MappingView):
        return False
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0  # an array without axes only looks like one


def _switch(options: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be True or False; got {value!r:.40}; leave it out", parameter=name)
    return value


class PromptReader:
    """Encodes and checks prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, vocab_size: int) -> None:
        """Read prompts for a model.

        Args:
            tokenizer: of the model.
            template: its chat template.
            vocab_size: ids below this are valid.
        """
        self._tokenizer, self._template, self._vocab_size = tokenizer, template, vocab_size

    def read(self, prompt: Prompt) -> EncodedPrompt:
        """Encode one prompt.

        Raises:
            InvalidPromptError: it is empty, has an id that is no integer or outside the vocabulary, or the wrong shape.
        """
        if isinstance(prompt, Mapping):
            prompt = self._unwrap(prompt)
        if isinstance(prompt, str):
            encoded = EncodedPrompt(text=str(prompt), token_ids=self._tokenizer.encode(prompt))
        else:
            encoded = EncodedPrompt(text=None, token_ids=self._check_ids(prompt))
        if not encoded.token_ids:
            raise InvalidPromptError(
                "a prompt must have at least one token; got an empty one; give it some text", parameter="prompt"
            )
        return encoded

    def render(self, messages: object, **options: object) -> EncodedPrompt:
        """Render a conversation and find how much of it the next turn will share.

        Args:
            messages: as a client sends them.
            options: `tools`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`.

        Raises:
            InvalidPromptError: no messages, or no list of them.
            RequestError: messages, tools or options that the template cannot take.
        """
        messages = _as_messages(messages)
        for name in options:
            if name not in _TEMPLATE_OPTIONS:
                raise UnsupportedParameterError(
                    f"chat takes {', '.join(_TEMPLATE_OPTIONS)}; got {name!r}; leave it out", parameter=name
                )
        variables = options.get("chat_template_kwargs")
        if variables is not None and not isinstance(variables, Mapping):
            raise InvalidParameterError(
                f"chat_template_kwargs must be a mapping; got {type(variables).__name__}",
                parameter="chat_template_kwargs",
            )
        names = cast("Mapping[str, object] | None", variables)
        tools, goes_on = options.get("tools"), _switch(options, "continue_final_message", default=False)
        opens = _switch(options, "add_generation_prompt", default=True) and not goes_on
        text = self._template.render(
            messages, tools, add_generation_prompt=opens, continue_final_message=goes_on, variables=names
        )
        ids = self._tokenizer.encode(text)
        if not ids:
            raise InvalidPromptError("the chat template renders these messages to nothing", parameter="messages")
        samples = self._template.next_turns(
            cast("Sequence[Mapping[str, object]]", messages),
            cast("Sequence[Mapping[str, object]] | None", tools),
            variables=names,
        )
        return EncodedPrompt(text=text, token_ids=ids, turn_borders=turn_borders(self._tokenizer, text, ids, samples))

    def _unwrap(self, prompt: Mapping[str, object]) -> str | Sequence[int]:
        given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
        spare = set(prompt) - {"prompt", "prompt_token_ids"}
        if len(given) != 1 or spare:
            raise InvalidPromptError(
                "a prompt dict must have exactly one of 'prompt' and 'prompt_token_ids' and nothing else; got "
                f"{sorted(map(str, prompt))}",
                parameter="prompt",
            )
        value = prompt[given[0]]
        if given[0] == "prompt" and not isinstance(value, str):
            raise InvalidPromptError(f"'prompt' must be text; got {type(value).__name__}", parameter="prompt")
        if given[0] == "prompt_token_ids" and isinstance(value, str):
            raise InvalidPromptError("'prompt_token_ids' must be token ids; got text", parameter="prompt")
        return cast("str | Sequence[int]", value)

    def _check_ids(self, ids: object) -> list[int]:
        if isinstance(ids, str) or not _is_series(ids):
            raise InvalidPromptError(
                f"a prompt must be text or a sequence of token ids; got {type(ids).__name__}", parameter="prompt"
            )
        checked: list[int] = []
        for value in cast("Sequence[object]", ids):
            try:
                number = index(cast("SupportsIndex", value))
            except TypeError:
                number = None
            if number is None or isinstance(value, bool):
                raise InvalidPromptError(
                    f"token ids must be integers; got {value!r:.40} of type {type(value).__name__}", parameter="prompt"
                ) from None
            if not 0 <= number < self._vocab_size:
                raise InvalidPromptError(
                    f"token ids must be in 0..{self._vocab_size - 1}, the model's vocabulary; got {number}; encode the "
                    "text with the model's own tokenizer",
                    parameter="prompt",
                )
            checked.append(number)
        return checked
