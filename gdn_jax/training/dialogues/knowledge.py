"""Questions whose answers stand in tables: capitals, animals, words and their meanings, days and months."""

from collections.abc import Callable, Sequence
from random import Random

from gdn_jax.training.dialogues import facts
from gdn_jax.training.dialogues.dialogue import Turn
from gdn_jax.training.dialogues.words import (
    ANIMALS,
    CITIES,
    DAYS,
    FRUITS,
    MONTHS,
    NUMBER_WORDS,
    PLURALS_TO_ASK,
    VEGETABLES,
    article,
    capitalized,
    plural,
)

_BEFORE = ["", "", "", "", "Please tell me: ", "Quick question: ", "A question: ", "I want to know: ", "Do you know? "]
_LESS_KNOWN = 3  # places apart in the order of size that nobody disputes


def phrased(rng: Random, wordings: Sequence[str]) -> str:
    """Draw one of some wordings, now and then with words before it."""
    return rng.choice(_BEFORE) + rng.choice(wordings)


def capital(rng: Random) -> Turn:
    """Ask for the capital of a country, for the country of a capital, or whether a city is one."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    kind = rng.randrange(3)
    if kind == 0:
        asked = [
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Capital of {country}?",
        ]
        answer, short = f"The capital of {country} is {city}.", city
    elif kind == 1:
        asked = [f"{city} is the capital of which country?", f"Which country has the capital {city}?"]
        answer, short = f"{city} is the capital of {country}.", country
    else:
        guess = city if rng.random() < 0.5 else rng.choice([name for name in CITIES if name != city])
        asked = [f"Is {guess} the capital of {country}?", f"Is the capital of {country} {guess}?"]
        right = guess == city
        answer = f"Yes, {city} is the capital of {country}." if right else f"No, the capital of {country} is {city}."
        return Turn(
            question=phrased(rng, asked),
            answer=answer,
            content=("is-capital", country, guess),
            short="Yes" if right else "No",
        )
    return Turn(question=phrased(rng, asked), answer=answer, content=("capital", kind, country), short=short)


def animal(rng: Random) -> Turn:
    """Ask for the class, the legs, the sound or the young of an animal."""
    name, (kind, legs, sound, young, _) = rng.choice(list(ANIMALS.items()))
    number = NUMBER_WORDS[legs] if legs else "no"
    cases = [
        (
            [f"How many legs does {article(name)} have?", f"How many legs has {article(name)}?"],
            f"{capitalized(article(name))} has {number} legs.",
            number,
        ),
        (
            [f"What kind of animal is {article(name)}?", f"What class of animals do {plural(name)} belong to?"],
            f"{capitalized(article(name))} is {article(kind)}.",
            kind,
        ),
    ]
    if sound:
        asked = [f"What sound does {article(name)} make?", f"What does {article(name)} say?"]
        cases.append((asked, f"{capitalized(article(name))} makes the sound {sound}.", sound))
    if young:
        asked = [f"What is a young {name} called?", f"What do you call a baby {name}?"]
        cases.append((asked, f"A young {name} is called {article(young)}.", young))
    index = rng.randrange(len(cases))
    asked, answer, short = cases[index]
    return Turn(question=phrased(rng, asked), answer=answer, content=("animal", short, name), short=short)


def is_animal_class(rng: Random) -> Turn:
    """Ask whether an animal belongs to a class."""
    name = rng.choice(list(ANIMALS))
    kind = ANIMALS[name][0]
    guess = kind if rng.random() < 0.5 else rng.choice([other for other in _CLASSES if other != kind])
    asked = [f"Is {article(name)} {article(guess)}?", f"Are {plural(name)} {plural(guess)}?"]
    right = guess == kind
    subject = article(name)
    answer = f"Yes, {subject} is {article(kind)}." if right else f"No, {subject} is {article(kind)}."
    return Turn(
        question=phrased(rng, asked), answer=answer, content=("is-class", name, guess), short="Yes" if right else "No"
    )


def larger_animal(rng: Random) -> Turn:
    """Ask which of two animals is larger or smaller."""
    while True:
        left, right = rng.sample(list(ANIMALS), 2)
        if abs(ANIMALS[left][4] - ANIMALS[right][4]) >= _LESS_KNOWN:
            break
    more, less = rng.choice([("bigger", "smaller"), ("larger", "smaller")])
    big, small = sorted((left, right), key=lambda name: -ANIMALS[name][4])
    word, first, second = rng.choice([(more, big, small), (less, small, big)])
    asked = [
        f"Which is {word}, {article(left)} or {article(right)}?",
        f"What is {word}: {article(left)} or {article(right)}?",
    ]
    answer = f"{capitalized(article(first))} is {word} than {article(second)}."
    content = ("larger", *sorted((left, right)), word == less)
    return Turn(question=phrased(rng, asked), answer=answer, content=content, short=first)


def opposite(rng: Random) -> Turn:
    """Ask for the opposite of a word."""
    pair = rng.choice(list(facts.OPPOSITES.items()))
    word, other = pair if rng.random() < 0.6 else pair[::-1]
    asked = [f"What is the opposite of {word}?", f"What is the opposite of the word {word}?", f"Opposite of {word}?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"The opposite of {word} is {other}.",
        content=("opposite", word),
        short=other,
    )


def past_tense(rng: Random) -> Turn:
    """Ask for the past tense of a verb."""
    verb, past = rng.choice(list(facts.PAST_TENSES.items()))
    asked = [f"What is the past tense of {verb}?", f"What is the past of the verb {verb}?", f"Past tense of {verb}?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"The past tense of {verb} is {past}.",
        content=("past", verb),
        short=past,
    )


def plural_of(rng: Random) -> Turn:
    """Ask for the plural of a noun."""
    noun = rng.choice(PLURALS_TO_ASK)
    asked = [f"What is the plural of {noun}?", f"What is the plural form of {noun}?", f"Plural of {noun}?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"The plural of {noun} is {plural(noun)}.",
        content=("plural", noun),
        short=plural(noun),
    )


def colour(rng: Random) -> Turn:
    """Ask for the colour of a thing."""
    thing, shade = rng.choice(list(facts.COLOUR_OF.items()))
    asked = [f"What colour is {thing}?", f"Which colour does {thing} have?", f"What is the colour of {thing}?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"{capitalized(thing)} is {shade}.",
        content=("colour", thing),
        short=shade,
    )


def fruit_or_vegetable(rng: Random) -> Turn:
    """Ask whether a plant is a fruit or a vegetable."""
    kind = rng.choice(["fruit", "vegetable"])
    noun = rng.choice(FRUITS if kind == "fruit" else [name for name in VEGETABLES if name not in _DISPUTED])
    asked = [f"Is {article(noun)} a fruit or a vegetable?", f"Are {plural(noun)} fruit or vegetables?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"{capitalized(article(noun))} is a {kind}.",
        content=("plant", noun),
        short=kind,
    )


def calendar(rng: Random) -> Turn:
    """Ask for a day or month beside another, or for the length of a month."""
    kind = rng.randrange(3)
    if kind == 0:
        month = rng.choice(list(MONTHS))
        asked = [f"How many days does {month} have?", f"How many days are in {month}?", f"How long is {month}?"]
        usual = f"{month} has {MONTHS[month]} days"
        answer = f"{usual}, and 29 in a leap year." if month == "February" else f"{usual}."
        return Turn(question=phrased(rng, asked), answer=answer, content=("month", month), short=str(MONTHS[month]))
    series, what = (DAYS, "day") if kind == 1 else (list(MONTHS), "month")
    item, (word, step) = rng.choice(series), rng.choice([("after", 1), ("before", -1)])
    found = series[(series.index(item) + step) % len(series)]
    asked = [f"Which {what} comes {word} {item}?", f"What {what} is {word} {item}?", f"What comes {word} {item}?"]
    return Turn(
        question=phrased(rng, asked),
        answer=f"{found} comes {word} {item}.",
        content=("calendar", item, word),
        short=found,
    )


def fact(rng: Random) -> Turn:
    """Ask for a fact of everyday knowledge."""
    question, answer, short = rng.choice(facts.QUESTIONS)
    return Turn(question=phrased(rng, [question]), answer=answer, content=("fact", question), short=short)


def meaning(rng: Random, glosses: Sequence[tuple[str, str]]) -> Turn:
    """Ask what a word means."""
    word, gloss = rng.choice(glosses)
    asked = [
        f"What does {word} mean?", f"What does the word {word} mean?", f"Define {word}.", f'What does "{word}" mean?',
        f"What is the meaning of {word}?", f"Explain the word {word}.", f"Give me a definition of {word}.",
    ]  # fmt: skip
    return Turn(question=phrased(rng, asked), answer=f"{capitalized(word)}: {gloss}.", content=("meaning", word))


_CLASSES = ["mammal", "bird", "insect", "amphibian"]
_DISPUTED = {"pumpkin", "pea", "bean"}  # fruits to a botanist
KINDS: tuple[Callable[[Random], Turn], ...] = (
    capital, animal, is_animal_class, larger_animal, opposite, past_tense, plural_of, colour, fruit_or_vegetable,
    calendar, fact,
)  # fmt: skip
