"""Chat: small talk, questions, word tasks, and conversations of up to four turns that refer back."""

from collections.abc import Callable, Sequence
from random import Random

from gdn_jax.training.dialogues import glosses, knowledge, memory, small_talk, word_tasks
from gdn_jax.training.dialogues.dialogue import Dialogue, Message, Turn, say
from gdn_jax.training.dialogues.words import NAMES

_KEPT = {"name", "favourite", "never-told", "person"}
Glosses = Sequence[tuple[str, str]]
_SYSTEMS = [
    "You are Pico, a helpful assistant.", "You are a helpful assistant.", "You are Pico. Answer briefly.",
    "Answer in short sentences.", "You are a kind assistant.", "Be brief and clear.",
]  # fmt: skip

_SHORT = ["Answer in one word.", "Give the answer only, no sentence.", "Use as few words as you can."]
_ENDINGS = ["Thank you.", "Over.", "Have a nice day.", "Good luck!"]
_OPENINGS = ["Arr!", "OK:", "Well:", "Sure:"]


def dialogue(rng: Random, pairs: Glosses = glosses.BUILT_IN) -> Dialogue:
    """Draw a conversation; `pairs` are the words whose meaning may be asked."""
    kind = rng.random()
    if kind < 0.10:
        return _named(rng)
    if kind < 0.22:
        return _styled(rng, pairs)
    turns = _remembering(rng, pairs) if kind < 0.5 else [single(rng, pairs) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    if rng.random() < 0.1:
        turns.append(small_talk.thanks(rng))
    system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else ""
    return assembled(turns, system)


def single(rng: Random, pairs: Glosses = glosses.BUILT_IN) -> Turn:
    """Draw a question that needs nothing before it."""
    kind = rng.random()
    if kind < 0.12:
        draw = rng.choice((small_talk.greeting, small_talk.greeting, small_talk.talk, small_talk.identity))
        return draw(rng)
    if kind < 0.20:
        return small_talk.unknown(rng)
    if kind < 0.40:
        return knowledge.meaning(rng, pairs)
    if kind < 0.62:
        return rng.choice(knowledge.KINDS)(rng)
    return rng.choice(word_tasks.KINDS)(rng)


def assembled(turns: Sequence[Turn], system: str = "") -> Dialogue:
    """Return turns as a dialogue, after a system message if there is one."""
    messages: list[Message] = [say("system", system)] if system else []
    for turn in turns:
        messages += [say("user", turn.question), say("assistant", turn.answer)]
    return Dialogue(messages=tuple(messages), contents=tuple(turn.content for turn in turns), domain="chat")


def _remembering(rng: Random, pairs: Glosses) -> list[Turn]:
    """Draw turns that refer back, half of them with something else in between."""
    first, *rest = rng.choice(memory.KINDS)(rng)
    apart = first.content[0] in _KEPT and len(rest) == 1  # other references look one turn back
    between = [single(rng, pairs) for _ in range(rng.choice([0, 1, 1, 2]))] if apart else []
    return [first, *[turn for turn in between if turn.content[0] not in {"greeting", "identity"}], *rest]


def _named(rng: Random) -> Dialogue:
    """Draw a conversation with an assistant that the system message names."""
    name = rng.choice(NAMES)
    system = rng.choice([
        f"You are {name}, a helpful assistant.", f"Your name is {name}.", f"You are called {name}. Be kind.",
        f"You are an assistant named {name}.",
    ])  # fmt: skip
    turns = [small_talk.identity(rng, name)]
    if rng.random() < 0.4:
        turns.insert(rng.randrange(2), rng.choice(knowledge.KINDS)(rng))
    return assembled(turns, system)


def _styled(rng: Random, pairs: Glosses) -> Dialogue:
    """Draw a conversation under a system message that asks for a style."""
    number = rng.choice([1, 1, 2])
    if rng.random() < 0.35:
        short = [turn for turn in (single(rng, pairs) for _ in range(12)) if turn.short][:number]
        if short:
            return assembled([_worded(turn, turn.short) for turn in short], rng.choice(_SHORT))
    system, restyle = _style(rng)
    turns = [single(rng, pairs) for _ in range(number)]
    return assembled([_worded(turn, restyle(turn.answer)) for turn in turns], system)


def _style(rng: Random) -> tuple[str, Callable[[str], str]]:
    """Draw a system message and what it makes of an answer."""
    ending, opening = rng.choice(_ENDINGS), rng.choice(_OPENINGS)
    styles: list[tuple[list[str], Callable[[str], str]]] = [
        (["Answer in capital letters.", "Always write in capital letters.", "Use upper case only."], str.upper),
        (["Write small letters only.", "Answer in lower case."], str.lower),
        ([f'End every answer with "{ending}"'], lambda text: f"{text} {ending}"),
        ([f'Begin every answer with "{opening}"'], lambda text: f"{opening} {text}"),
    ]
    wordings, restyle = rng.choice(styles)
    return rng.choice(wordings), restyle


def _worded(turn: Turn, answer: str) -> Turn:
    return Turn(question=turn.question, answer=answer, content=turn.content, short=turn.short)
