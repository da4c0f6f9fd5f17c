"""What a dialogue is, and which ones are held out.

A dialogue is held out by what its last question is about, for most questions however that is worded:
`23 + 45` is held out in every wording and in every order, or in none. So no prompt of a held-out dialogue was ever one
in training. Talk has no content but its words (`small_talk.py`, "What did I ask?"), so there a wording is held out, and
others of the same meaning are trained on. What a table says may also be asked in several ways (the capital of a
country, the country of a capital), each of which is a content of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

Content = tuple[str | int, ...]  # the slots of a question, in an order that does not depend on its wording
Message = dict[str, object]  # OpenAI's form
HELD_OUT_PERCENT = 3


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: what the user says.
        answer: what the assistant says.
        content: what the question is about; empty for talk that is about nothing.
        short: the answer in a word, where there is one.
    """

    question: str
    answer: str
    content: Content
    short: str = ""


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A conversation that ends with the assistant's right answer.

    Attributes:
        messages: in OpenAI's form, thoughts as `reasoning_content`.
        contents: what each question is about, the last one last.
        tools: function descriptions in OpenAI's form.
        template: variables of the chat template, e.g. `enable_thinking`.
        domain: the generator that made it.
    """

    messages: tuple[Message, ...]
    contents: tuple[Content, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    template: Mapping[str, object] = field(default_factory=dict)
    domain: str = ""

    def asked(self) -> tuple[Message, ...]:
        """Return the messages up to the user's last one."""
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: last + 1]


def is_held_out(content: Content) -> bool:
    """Say whether questions about `content` are kept from training; the same on every machine."""
    digest = blake2b(repr(content).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % 100 < HELD_OUT_PERCENT


def fits(dialogue: Dialogue, *, held_out: bool) -> bool:
    """Say whether a dialogue belongs to the held-out ones, or to training.

    Of a held-out dialogue the last question is; of one for training, none. Those between belong to neither.
    """
    if held_out:
        return is_held_out(dialogue.contents[-1])
    return not any(is_held_out(content) for content in dialogue.contents)


def say(role: str, content: str) -> Message:
    """Return a message of text."""
    return {"role": role, "content": content}
