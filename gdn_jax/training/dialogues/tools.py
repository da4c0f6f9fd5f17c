"""Dialogues with functions: one call, two after each other, none, one that asks back first, one that fails."""

import json
from collections.abc import Mapping, Sequence
from random import Random

from gdn_jax.training.dialogues import chat
from gdn_jax.training.dialogues.dialogue import Content, Dialogue, Message, say
from gdn_jax.training.dialogues.functions import FUNCTIONS, NamedFunction, Use, weather_result
from gdn_jax.training.dialogues.words import CITIES, counted

_SYSTEMS = ["You are Pico, a helpful assistant.", "You are a helpful assistant.", "Be brief.", "Use the tools."]
_FAILURES = ["not found", "no connection", "try again later", "not allowed"]
_JOINTS = [" Also: ", " And then: ", " ", " Then: "]


def dialogue(rng: Random) -> Dialogue:
    """Draw a dialogue with one to four functions at hand."""
    kind = rng.random()
    if kind < 0.42:
        return _one_call(rng)
    if kind < 0.52:
        return _two_questions(rng)
    if kind < 0.58:
        return _compared(rng)
    if kind < 0.64:
        return _from_result(rng)
    if kind < 0.76:
        return _asked_back(rng)
    if kind < 0.90:
        return _no_call(rng)
    return _lacking(rng) if kind < 0.95 else _failed(rng)


def called(function: NamedFunction, arguments: Mapping[str, object], result: Mapping[str, object]) -> list[Message]:
    """Return an assistant's call and what it gives."""
    call = {"name": function.schema["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": json.dumps(result, ensure_ascii=False)},
    ]


def _used(function: NamedFunction, use: Use) -> list[Message]:
    return called(function, function.arguments(use), use.result)


def _at_hand(rng: Random, wanted: Sequence[int], *, without: int = -1) -> dict[int, NamedFunction]:
    """Draw functions with names of their own, the wanted ones among them, in any order."""
    others = [index for index in range(len(FUNCTIONS)) if index not in wanted and index != without]
    chosen = [*wanted, *rng.sample(others, max(1 - len(wanted), rng.choice([0, 0, 1, 1, 2])))]
    rng.shuffle(chosen)
    return {index: FUNCTIONS[index].named(rng) for index in chosen}


def _made(
    rng: Random, functions: Mapping[int, NamedFunction], messages: Sequence[Message], contents: Sequence[Content]
) -> Dialogue:
    tools = tuple({"type": "function", "function": function.schema} for function in functions.values())
    lead = [say("system", rng.choice(_SYSTEMS))] if rng.random() < 0.2 else []
    return Dialogue(messages=(*lead, *messages), contents=tuple(contents), tools=tools, domain="tools")


def _one_call(rng: Random) -> Dialogue:
    """Draw a question and its call; some go on with another question."""
    index = rng.randrange(len(FUNCTIONS))
    functions = _at_hand(rng, [index])
    messages: list[Message] = []
    contents: list[Content] = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        use = FUNCTIONS[index].draw(rng)
        messages += [say("user", use.question), *_used(functions[index], use), say("assistant", use.answer)]
        contents.append(use.content)
        index = rng.choice(list(functions))
    return _made(rng, functions, messages, contents)


def _two_questions(rng: Random) -> Dialogue:
    """Draw two questions in one message: a call for each, one after the other."""
    indices = rng.sample(range(len(FUNCTIONS)), 2)
    functions = _at_hand(rng, indices)
    uses = [FUNCTIONS[index].draw(rng) for index in indices]
    messages = [say("user", uses[0].question + rng.choice(_JOINTS) + uses[1].question)]
    for index, use in zip(indices, uses, strict=True):
        messages += _used(functions[index], use)
    messages.append(say("assistant", f"{uses[0].answer} {uses[1].answer}"))
    return _made(rng, functions, messages, [uses[0].content, uses[1].content])


def _compared(rng: Random) -> Dialogue:
    """Draw a comparison of the weather in two cities."""
    functions = _at_hand(rng, [0])
    cities = rng.sample(CITIES, 2)
    results = [weather_result(rng, city) for city in cities]
    word, wanted = rng.choice([("warmer", 1), ("colder", -1)])
    asked = rng.choice([
        f"Is it {word} in {cities[0]} or in {cities[1]}?", f"Which city is {word}, {cities[0]} or {cities[1]}?",
        f"Where is it {word}: {cities[0]} or {cities[1]}?",
    ])  # fmt: skip
    messages = [say("user", asked)]
    for city, result in zip(cities, results, strict=True):
        messages += called(functions[0], {functions[0].keys["city"]: city}, result)
    degrees = [int(str(result["temperature"])) for result in results]
    if degrees[0] == degrees[1]:
        answer = f"Both have {degrees[0]} degrees."
    else:
        best, other = sorted((0, 1), key=lambda index: -wanted * degrees[index])
        answer = f"It is {word} in {cities[best]}, with {degrees[best]} degrees. {cities[other]} has {degrees[other]}."
    messages.append(say("assistant", answer))
    return _made(rng, functions, messages, [("warmer", *sorted(cities))])


def _from_result(rng: Random) -> Dialogue:
    """Draw a sum whose result is the length of a timer."""
    functions = _at_hand(rng, [1, 2])
    left, right = rng.randint(1, 60), rng.randint(1, 30)
    total = left + right
    asked = rng.choice([
        f"Add {left} and {right} and set a timer for that many minutes.",
        f"Set a timer for {left} + {right} minutes.",
        f"What is {left} + {right}? Start a timer of so many minutes.",
    ])  # fmt: skip
    messages = [
        say("user", asked),
        *called(functions[2], {functions[2].keys["expression"]: f"{left} + {right}"}, {"result": total}),
        *called(functions[1], {functions[1].keys["minutes"]: total}, {"status": "started", "minutes": total}),
        say("assistant", f"{left} + {right} is {total}. The timer is set for {counted(total, 'minute')}."),
    ]
    return _made(rng, functions, messages, [("timer-sum", *sorted((left, right)))])


def _asked_back(rng: Random) -> Dialogue:
    """Draw a question with an argument missing: the assistant asks for it, then calls."""
    while True:
        index = rng.randrange(len(FUNCTIONS))
        use = FUNCTIONS[index].draw(rng)
        if use.vague:
            break
    functions = _at_hand(rng, [index])
    messages = [say("user", use.vague), say("assistant", use.back), say("user", use.reply)]
    messages += [*_used(functions[index], use), say("assistant", use.answer)]
    return _made(rng, functions, messages, [use.content])


def _no_call(rng: Random) -> Dialogue:
    """Draw a conversation that needs none of the functions."""
    functions = _at_hand(rng, [])
    turns = [turn for turn in (chat.single(rng) for _ in range(8)) if turn.content[0] != "unknown"]
    plain = chat.assembled(turns[: rng.choice([1, 1, 2])])
    return _made(rng, functions, plain.messages, plain.contents)


def _lacking(rng: Random) -> Dialogue:
    """Draw a wish for which there is no function."""
    index = rng.choice([index for index in range(len(FUNCTIONS)) if index not in _ANSWERED_OTHERWISE])
    functions = _at_hand(rng, [], without=index)
    for other in _ANSWERED_OTHERWISE:  # a search could answer many a question
        functions.pop(other, None)
    if not functions:
        functions = {other: FUNCTIONS[other].named(rng) for other in [(index + 1) % len(FUNCTIONS)]}
    use = FUNCTIONS[index].draw(rng)
    answer = f"I cannot {FUNCTIONS[index].topic}. I have no tool for it."
    return _made(rng, functions, [say("user", use.question), say("assistant", answer)], [use.content])


def _failed(rng: Random) -> Dialogue:
    """Draw a call that gives an error."""
    index = rng.randrange(len(FUNCTIONS))
    functions = _at_hand(rng, [index])
    use, error = FUNCTIONS[index].draw(rng), rng.choice(_FAILURES)
    messages = [
        say("user", use.question),
        *called(functions[index], functions[index].arguments(use), {"error": error}),
        say("assistant", f"That did not work: {error}."),
    ]
    return _made(rng, functions, messages, [use.content])


_ANSWERED_OTHERWISE = {3}  # the search
