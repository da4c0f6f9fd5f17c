"""Sums: small ones answered at once, larger ones with the steps of each digit as thoughts."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gdn_jax.training.dialogues.dialogue import Content, Dialogue, Message, say
from gdn_jax.training.dialogues.words import DAYS, FRUITS, NAMES, OBJECTS, article, capitalized, counted, plural

_BEFORE = ["", "", "", "", "Please tell me: ", "Quick question: ", "Can you help? ", "I have a sum. "]


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """A question, its answer, and the steps that lead there, if it takes any."""

    question: str
    answer: str
    content: Content
    steps: tuple[str, ...] = ()


def dialogue(rng: Random) -> Dialogue:
    """Draw one to three sums in a row; those with steps are thought about."""
    thinking = rng.random() < 0.4
    if thinking:
        sums = [rng.choice(_WITH_STEPS)(rng, True)]
    else:
        sums = [rng.choice(_KINDS)(rng, False) for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
    messages: list[Message] = []
    for item in sums:
        answer = say("assistant", item.answer)
        thoughts = {"reasoning_content": "\n".join(item.steps)} if thinking else {}
        messages += [say("user", item.question), answer | thoughts]
    template = {"enable_thinking": True} if thinking else {}
    contents = tuple(item.content for item in sums)
    return Dialogue(messages=tuple(messages), contents=contents, template=template, domain="arithmetic")


def added_by_digits(left: int, right: int) -> tuple[str, ...]:
    """Return the steps of an addition, last digit first, with carries."""
    steps, carry = [], 0
    width = max(len(str(left)), len(str(right)))
    for place in range(width):
        first, second = (number // 10**place % 10 for number in (left, right))
        total = first + second + carry
        terms = f"{first} + {second}" + (" + 1" if carry else "")
        carry = total // 10
        steps.append(f"{terms} = {total}, write {total % 10}" + (", carry 1" if carry else ""))
    if carry:
        steps.append("write 1")
    return (*steps, f"{left} + {right} = {left + right}")


def subtracted_by_digits(left: int, right: int) -> tuple[str, ...]:
    """Return the steps of a subtraction that stays at or above 0, last digit first, with borrowing."""
    steps, borrow = [], 0
    for place in range(len(str(left))):
        first, second = (number // 10**place % 10 for number in (left, right))
        tail = " - 1" if borrow else ""
        borrow, digit = divmod(first - second - borrow, 10)
        borrow = -borrow
        steps.append(
            f"{first + 10 * borrow} - {second}{tail} = {digit}, write {digit}" + (", borrow 1" if borrow else "")
        )
    return (*steps, f"{left} - {right} = {left - right}")


def multiplied_by_places(left: int, right: int) -> tuple[str, ...]:
    """Return the steps of a product: the left number part by part, then the parts added up."""
    parts = [digit * 10**place for place, digit in enumerate(map(int, reversed(str(left)))) if digit]
    steps = [f"{part} * {right} = {part * right}" for part in parts]
    if len(parts) > 1:
        steps.append(f"{' + '.join(str(part * right) for part in parts)} = {left * right}")
    return (*steps, f"{left} * {right} = {left * right}")


def _number(rng: Random, *, thinking: bool) -> int:
    """Draw a number: up to 4 digits where there are steps, mostly up to 2 where there are none."""
    digits = rng.choice([2, 3, 3, 4, 4]) if thinking else rng.choice([1, 1, 2, 2, 2, 2, 3, 3, 4])
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def _asked(rng: Random, forms: list[str], **slots: object) -> str:
    return rng.choice(_BEFORE) + rng.choice(forms).format(**slots)


def _addition(rng: Random, thinking: bool) -> _Sum:
    left, right = _number(rng, thinking=thinking), _number(rng, thinking=thinking)
    forms = [
        "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} plus {b}?",
        "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "What is {a} plus {b}?",
    ]  # fmt: skip
    return _Sum(
        question=_asked(rng, forms, a=left, b=right),
        answer=f"{left} + {right} = {left + right}",
        content=("+", *sorted((left, right))),
        steps=added_by_digits(left, right),
    )


def _subtraction(rng: Random, thinking: bool) -> _Sum:
    right, left = sorted((_number(rng, thinking=thinking), _number(rng, thinking=thinking)))
    forms = [
        "What is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?", "Subtract {b} from {a}.", "How much is {a} minus {b}?",
        "What is the difference between {a} and {b}?", "Calculate {a} - {b}.", "Take {b} away from {a}.",
    ]  # fmt: skip
    return _Sum(
        question=_asked(rng, forms, a=left, b=right),
        answer=f"{left} - {right} = {left - right}",
        content=("-", left, right),
        steps=subtracted_by_digits(left, right),
    )


def _product(rng: Random, thinking: bool) -> _Sum:
    left, right = (rng.randint(11, 999), rng.randint(2, 9)) if thinking else (rng.randint(0, 12), rng.randint(0, 12))
    forms = [
        "What is {a} * {b}?", "{a} * {b}", "{a} times {b}", "Multiply {a} by {b}.", "How much is {a} times {b}?",
        "What is the product of {a} and {b}?", "Calculate {a} * {b}.", "What is {a} times {b}?",
    ]  # fmt: skip
    return _Sum(
        question=_asked(rng, forms, a=left, b=right),
        answer=f"{left} * {right} = {left * right}",
        content=("*", *sorted((left, right))),
        steps=multiplied_by_places(left, right),
    )


def _division(rng: Random, _: bool) -> _Sum:
    divisor, result, rest = rng.randint(2, 12), rng.randint(1, 12), 0
    if rng.random() < 0.4:
        rest = rng.randint(1, divisor - 1)
    number = divisor * result + rest
    forms = ["What is {a} / {b}?", "Divide {a} by {b}.", "How much is {a} divided by {b}?", "{a} / {b}"]
    answer = f"{number} / {divisor} = {result}" + (f" remainder {rest}" if rest else "")
    return _Sum(question=_asked(rng, forms, a=number, b=divisor), answer=answer, content=("/", number, divisor))


def _comparison(rng: Random, _: bool) -> _Sum:
    numbers = rng.sample(range(10 ** rng.randint(1, 4)), rng.choice([2, 2, 3, 4]))
    shown = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
    word, pick = rng.choice(
        [("larger", max), ("smaller", min)] if len(numbers) == 2 else [("largest", max), ("smallest", min)]
    )
    forms = ["Which number is {w}: {s}?", "Which is {w}, {s}?", "What is {w}, {s}?", "Tell me which is {w}: {s}."]
    kind = "max" if pick is max else "min"
    return _Sum(
        question=_asked(rng, forms, w=word, s=shown),
        answer=f"{pick(numbers)} is {word if len(numbers) == 2 else 'the ' + word}.",
        content=(kind, *sorted(numbers)),
    )


def _yes_or_no(rng: Random, _: bool) -> _Sum:
    left, right = rng.sample(range(10 ** rng.randint(1, 4)), 2)
    word, right_answer = rng.choice([("larger", left > right), ("smaller", left < right)])
    true_word = word if right_answer else {"larger": "smaller", "smaller": "larger"}[word]
    return _Sum(
        question=_asked(rng, ["Is {a} {w} than {b}?", "Is the number {a} {w} than {b}?"], a=left, b=right, w=word),
        answer=f"{'Yes' if right_answer else 'No'}, {left} is {true_word} than {right}.",
        content=("is-larger", *sorted((left, right))),
    )


def _property(rng: Random, _: bool) -> _Sum:
    number = rng.randint(1, 200)
    parity = "even" if number % 2 == 0 else "odd"
    asked, answer, kind = rng.choice([
        (f"Is {number} even or odd?", f"{number} is {parity}.", "parity"),
        (f"Is {number} an even number?", f"{'Yes' if parity == 'even' else 'No'}, {number} is {parity}.", "parity"),
        (f"What is double {number}?", f"Double {number} is {2 * number}.", "double"),
        (f"What is half of {2 * number}?", f"Half of {2 * number} is {number}.", "half"),
        (f"What number comes after {number}?", f"{number + 1} comes after {number}.", "after"),
        (f"What number comes before {number}?", f"{number - 1} comes before {number}.", "before"),
        (f"How many digits does {number} have?", f"{number} has {counted(len(str(number)), 'digit')}.", "digits"),
    ])  # fmt: skip
    return _Sum(question=rng.choice(_BEFORE) + asked, answer=answer, content=(kind, number))


def _sequence(rng: Random, _: bool) -> _Sum:
    start, step = rng.randint(0, 50), rng.choice([1, 2, 3, 4, 5, 10, 20])
    numbers = [start + index * step for index in range(4)]
    if rng.random() < 0.3:
        numbers = [number + 40 for number in numbers][::-1]
        step = -step
    shown = ", ".join(map(str, numbers))
    forms = ["What comes next: {s}?", "Which number is next? {s}", "Continue: {s}", "{s}, ?"]
    return _Sum(
        question=_asked(rng, forms, s=shown),
        answer=f"The next number is {numbers[-1] + step}.",
        content=("next", *numbers),
    )


def _sorted_numbers(rng: Random, _: bool) -> _Sum:
    numbers = rng.sample(range(10 ** rng.randint(2, 3)), rng.randint(3, 5))
    down = rng.random() < 0.3
    forms = ["Sort from large to small: {s}", "Largest first: {s}"] if down else [
        "Sort these numbers: {s}", "Sort from small to large: {s}", "Put in order: {s}", "Smallest first: {s}",
    ]  # fmt: skip
    return _Sum(
        question=_asked(rng, forms, s=", ".join(map(str, numbers))),
        answer=", ".join(map(str, sorted(numbers, reverse=down))),
        content=("sort", down, *sorted(numbers)),
    )


def _story(rng: Random, thinking: bool) -> _Sum:
    """Draw a sum told as a story; what it is about is the bare sum."""
    return rng.choice((_told_addition, _told_subtraction, _told_product))(rng, thinking)


def _told_addition(rng: Random, thinking: bool) -> _Sum:
    left, right = rng.randint(2, 999 if thinking else 50), rng.randint(2, 999 if thinking else 50)
    (name, other), (day, next_day), many = rng.sample(NAMES, 2), rng.sample(DAYS, 2), plural(rng.choice(_GOODS))
    question = rng.choice([
        f"{name} has {left} {many} and buys {right} more. How many {many} does {name} have now?",
        f"{name} has {left} {many} and {other} has {right}. How many do they have together?",
        f"A shop sold {left} {many} on {day} and {right} on {next_day}. How many in all?",
    ])  # fmt: skip
    return _Sum(
        question=question,
        answer=f"{left} + {right} = {left + right}, so {left + right} {many}.",
        content=("+", *sorted((left, right))),
        steps=added_by_digits(left, right),
    )


def _told_subtraction(rng: Random, thinking: bool) -> _Sum:
    right, left = sorted(rng.sample(range(2, 999 if thinking else 50), 2))
    (name, other), noun = rng.sample(NAMES, 2), rng.choice(_GOODS)
    many = plural(noun)
    question = rng.choice([
        f"{name} has {left} {many} and gives {right} to {other}. How many {many} are left?",
        f"There are {left} {many} in a shop and {right} are sold. How many are left?",
        f"{name} had {left} {many} and lost {right}. How many does {name} have now?",
    ])  # fmt: skip
    return _Sum(
        question=question,
        answer=f"{left} - {right} = {left - right}, so {counted(left - right, noun)}.",
        content=("-", left, right),
        steps=subtracted_by_digits(left, right),
    )


def _told_product(rng: Random, thinking: bool) -> _Sum:
    left, right = rng.randint(11, 99) if thinking else rng.randint(2, 10), rng.randint(2, 9)
    name, noun = rng.choice(NAMES), rng.choice(_GOODS)
    many = plural(noun)
    question, unit = rng.choice([
        (f"{name} has {right} boxes with {left} {many} each. How many {many} are there?", many),
        (f"{capitalized(article(noun))} costs {left} coins. How much do {right} {many} cost?", "coins"),
        (f"Each day {name} sells {left} {many}. How many in {right} days?", many),
    ])  # fmt: skip
    return _Sum(
        question=question,
        answer=f"{left} * {right} = {left * right}, so {left * right} {unit}.",
        content=("*", *sorted((left, right))),
        steps=multiplied_by_places(left, right),
    )


_GOODS = FRUITS + OBJECTS
_WITH_STEPS: tuple[Callable[[Random, bool], _Sum], ...] = (_addition, _addition, _subtraction, _product, _story)
_KINDS: tuple[Callable[[Random, bool], _Sum], ...] = (
    _addition, _addition, _subtraction, _subtraction, _product, _division, _comparison, _yes_or_no, _property,
    _sequence, _sorted_numbers, _story, _story,
)  # fmt: skip
