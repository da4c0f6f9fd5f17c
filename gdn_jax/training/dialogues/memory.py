"""Conversations whose last question refers to what was said before."""

from collections.abc import Callable
from random import Random

from gdn_jax.training.dialogues import facts
from gdn_jax.training.dialogues.dialogue import Turn
from gdn_jax.training.dialogues.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DRINKS,
    FOODS,
    FRUITS,
    HOBBIES,
    JOBS,
    NAMES,
    NUMBER_WORDS,
    PLACES,
    VEGETABLES,
    article,
    capitalized,
    listed,
    plural,
)

_THINGS = {
    "colour": COLOURS, "food": FOODS, "city": CITIES, "animal": list(ANIMALS), "fruit": FRUITS, "drink": DRINKS,
    "hobby": HOBBIES, "place": PLACES,
}  # fmt: skip
_RELATIONS = ["friend", "neighbour", "teacher", "cousin", "boss"]
_OKAY = ["Okay.", "Good.", "I will remember that.", "Thank you for telling me."]


def name_kept(rng: Random) -> list[Turn]:
    """The user tells a name and asks for it later."""
    name = rng.choice(NAMES)
    told = rng.choice([f"My name is {name}.", f"I am {name}.", f"Call me {name}.", f"Hi, my name is {name}."])
    asked = rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "What am I called?"])
    back = rng.choice([f"Hello, {name}!", f"Nice to meet you, {name}."])
    first = Turn(question=told, answer=back, content=("name", name))
    return [first, Turn(question=asked, answer=f"Your name is {name}.", content=("name", name), short=name)]


def favourite_kept(rng: Random) -> list[Turn]:
    """The user tells one or two favourite things and asks for one later."""
    kinds = rng.sample(list(_THINGS), rng.randint(1, 2))
    values = [rng.choice(_THINGS[kind]) for kind in kinds]
    told = " and ".join(f"my favourite {kind} is {value}" for kind, value in zip(kinds, values, strict=True))
    index = rng.randrange(len(kinds))
    asked = rng.choice([
        f"What is my favourite {kinds[index]}?", f"Which {kinds[index]} do I like best?",
        f"Do you remember my favourite {kinds[index]}?",
    ])  # fmt: skip
    told_things = sorted(f"{kind} {value}" for kind, value in zip(kinds, values, strict=True))
    content = ("favourite", *told_things, kinds[index])
    first = Turn(question=capitalized(told) + ".", answer=rng.choice(_OKAY), content=content)
    answer = f"Your favourite {kinds[index]} is {values[index]}."
    return [first, Turn(question=asked, answer=answer, content=content, short=values[index])]


def never_told(rng: Random) -> list[Turn]:
    """The user tells one thing and asks for another."""
    kind, other = rng.sample(list(_THINGS), 2)
    value = rng.choice(_THINGS[kind])
    content = ("never-told", kind, value, other)
    first = Turn(question=f"My favourite {kind} is {value}.", answer=rng.choice(_OKAY), content=content)
    asked = rng.choice([f"What is my favourite {other}?", f"Which {other} do I like best?"])
    return [
        first,
        Turn(question=asked, answer=f"You did not tell me your favourite {other}.", content=content, short="Unknown"),
    ]


def person_kept(rng: Random) -> list[Turn]:
    """The user tells about somebody and asks with a pronoun."""
    relation = rng.choice(_RELATIONS)
    name, city, job, age = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS), rng.randint(18, 80)
    told = f"My {relation} {name} is {age} years old, works as {article(job)} and lives in {city}."
    asked, answer, short = rng.choice([
        (f"Where does my {relation} live?", f"Your {relation} {name} lives in {city}.", city),
        (f"How old is {name}?", f"{name} is {age} years old.", str(age)),
        (f"What is the job of {name}?", f"{name} is {article(job)}.", job),
        (f"What is my {relation} called?", f"Your {relation} is called {name}.", name),
    ])  # fmt: skip
    content = ("person", relation, name, age, job, city)
    first = Turn(question=told, answer=rng.choice(_OKAY), content=content)
    return [first, Turn(question=asked, answer=answer, content=content, short=short)]


def shopping(rng: Random) -> list[Turn]:
    """The user keeps a list over some turns and asks for it."""
    items = rng.sample(FRUITS + VEGETABLES, rng.randint(3, 5))
    start = [plural(item) for item in items[:2]]
    turns = [
        Turn(
            question=rng.choice(["Start a list with {}.", "My shopping list: {}.", "I have to buy {}."]).format(
                listed(start)
            ),
            answer=f"Your list: {', '.join(start)}.",
            content=("shopping", *start),
        )
    ]
    for item in items[2:]:
        if len(start) > 1 and rng.random() < 0.3:
            gone = rng.choice(start)
            start = [other for other in start if other != gone]
            asked = rng.choice([f"Remove {gone}.", f"I do not need {gone}.", f"Take {gone} off the list."])
            content = ("shopping-remove", gone, *start)
        else:
            start = [*start, plural(item)]
            asked = rng.choice([f"Add {start[-1]}.", f"And {start[-1]}.", f"Put {start[-1]} on the list."])
            content = ("shopping", *start)
        turns.append(Turn(question=asked, answer=f"Your list: {', '.join(start)}.", content=content))
    number = NUMBER_WORDS[len(start)]
    word = "thing" if len(start) == 1 else "things"
    asked, answer = rng.choice([
        ("What is on my list?", f"Your list: {', '.join(start)}."),
        ("How many things are on my list?",
        f"There {'is' if len(start) == 1 else 'are'} {number} {word} on your list."),
        ("Read me the list.", f"Your list: {', '.join(start)}."),
    ])  # fmt: skip
    return (
        [*turns[:3], Turn(question=asked, answer=answer, content=("shopping-read", *start))]
        if len(turns) <= 3
        else turns
    )


def and_another(rng: Random) -> list[Turn]:
    """A question of knowledge, then the same of another thing in a few words."""
    first, second = rng.sample(list(facts.CAPITALS), 2)
    wording = rng.choice(["What is the capital of {}?", "Which city is the capital of {}?"])
    if rng.random() < 0.5:
        return [
            Turn(
                question=question.format(country),
                answer=f"The capital of {country} is {facts.CAPITALS[country]}.",
                content=("capital", 0, country),
                short=facts.CAPITALS[country],
            )
            for question, country in (
                (wording, first),
                (rng.choice(["And of {}?", "What about {}?", "And {}?"]), second),
            )
        ]
    word, other = rng.sample(list(facts.OPPOSITES), 2)
    return [
        Turn(
            question=question.format(item),
            answer=f"The opposite of {item} is {facts.OPPOSITES[item]}.",
            content=("opposite", item),
            short=facts.OPPOSITES[item],
        )
        for question, item in (("What is the opposite of {}?", word), (rng.choice(["And of {}?", "And {}?"]), other))
    ]


def said_before(rng: Random) -> list[Turn]:
    """The user asks for the last answer again, or in capitals."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    first = rng.choice([
        Turn(question=f"What is the capital of {country}?", answer=f"The capital of {country} is {city}.",
             content=("capital", 0, country)),
        Turn(question=f"Write a sentence about {name}.", answer=f"{name} is waiting in the {place}.",
             content=("about", name)),
    ])  # fmt: skip
    asked, answer = rng.choice([
        ("Say that again.", first.answer), ("Please repeat that.", first.answer),
        ("Write that in capital letters.", first.answer.upper()), ("Now in capital letters.", first.answer.upper()),
        ("What did I ask?", f'You asked: "{first.question}"'), ("What was my question?",
        f'You asked: "{first.question}"'),
    ])  # fmt: skip
    return [first, Turn(question=asked, answer=answer, content=("again", asked, first.answer))]


KINDS: tuple[Callable[[Random], list[Turn]], ...] = (
    name_kept, favourite_kept, favourite_kept, never_told, person_kept, person_kept, shopping, and_another, said_before,
)  # fmt: skip
