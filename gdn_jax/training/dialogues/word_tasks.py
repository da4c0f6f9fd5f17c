"""Tasks over words that stand in the question: lists to sort, sentences to rewrite, passages to read."""

from collections.abc import Callable
from random import Random

from gdn_jax.training.dialogues import facts, words
from gdn_jax.training.dialogues.dialogue import Turn
from gdn_jax.training.dialogues.words import (
    ADJECTIVES,
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
    OBJECTS,
    PLACES,
    VEGETABLES,
    article,
    capitalized,
    counted,
    listed,
    plural,
    some_items,
)

_KINDS_OF_THINGS = {
    "animals": list(ANIMALS), "fruits": FRUITS, "vegetables": VEGETABLES, "colours": COLOURS, "cities": CITIES,
    "jobs": JOBS, "hobbies": HOBBIES, "names": NAMES, "drinks": DRINKS, "foods": FOODS,
}  # fmt: skip
_VERBS = [verb for verb in facts.PAST_TENSES if verb in words.PLAIN_VERBS]


def _apart(rng: Random) -> list[str]:
    """Draw things of one kind, no two of one length, so that only one order by length is right."""
    while True:
        items = list({len(item): item for item in some_items(rng, 4, 6)}.values())
        if len(items) >= 3:
            return items


def sorted_list(rng: Random) -> Turn:
    """Ask for a list in another order."""
    items = some_items(rng, 3, 6)
    shown = ", ".join(items)
    kind = rng.choice(["alphabet", "reverse", "length"])
    if kind == "alphabet":
        asked = [
            f"Sort these words in alphabetical order: {shown}", f"Sort alphabetically: {shown}",
            f"Put these in alphabetical order: {shown}.", f"Can you order this list from A to Z? {shown}",
        ]  # fmt: skip
        result = sorted(items)
    elif kind == "reverse":
        asked = [
            f"Reverse this list: {shown}", f"Write this list backwards: {shown}.",
            f"Put these words in reverse order: {shown}",
        ]  # fmt: skip
        result = items[::-1]
    else:
        items = _apart(rng)
        shown = ", ".join(items)
        asked = [f"Sort these words from short to long: {shown}", f"Order by length, shortest first: {shown}"]
        result = sorted(items, key=len)
    return Turn(question=rng.choice(asked), answer=", ".join(result), content=("sort", kind, *items))


def counted_list(rng: Random) -> Turn:
    """Ask how many items a list has, or how many of them are one thing."""
    if rng.random() < 0.5:
        items = some_items(rng, 2, 8)
        shown = ", ".join(items)
        asked = [
            f"How many words are in this list: {shown}?",
            f"Count the items: {shown}",
            f"How many are these? {shown}",
        ]
        number = NUMBER_WORDS[len(items)]
        return Turn(
            question=rng.choice(asked),
            answer=f"There are {number}.",
            content=("count", *items),
            short=number,
        )
    first, second = some_items(rng, 2, 2)
    items = [rng.choice((first, second)) for _ in range(rng.randint(3, 7))]
    shown = ", ".join(items)
    asked = [f"How many times does {first} appear in this list: {shown}?", f"Count the word {first}: {shown}"]
    times = items.count(first)
    answer = f"The word {first} appears {counted(times, 'time') if times else 'zero times'}."
    return Turn(
        question=rng.choice(asked), answer=answer, content=("count-of", first, *items), short=NUMBER_WORDS[times]
    )


def picked(rng: Random) -> Turn:
    """Ask for one item of a list, or whether it is there."""
    items = some_items(rng, 3, 6)
    shown = ", ".join(items)
    kind = rng.choice(["first", "last", "second", "third", "has", "longest"])
    content = ("pick", kind, *items)
    if kind == "has":
        wanted = rng.choice(items) if rng.random() < 0.5 else rng.choice(some_items(rng, 1, 1))
        right = wanted in items
        asked = [f"Is {wanted} in this list: {shown}?", f"Does this list have {wanted}? {shown}"]
        answer = f"{'Yes' if right else 'No'}, {wanted} is {'' if right else 'not '}in the list."
        return Turn(question=rng.choice(asked), answer=answer, content=(*content, wanted), short=answer.split(",")[0])
    if kind == "longest":
        items = _apart(rng)
        shown, found = ", ".join(items), max(items, key=len)
        content = ("pick", kind, *items)
    else:
        found = items[{"first": 0, "second": 1, "third": 2, "last": -1}[kind]]
    asked = [f"What is the {kind} word in this list: {shown}?", f"Which is the {kind} word? {shown}"]
    return Turn(question=rng.choice(asked), answer=f"The {kind} word is {found}.", content=content, short=found)


def changed_list(rng: Random) -> Turn:
    """Ask for a list with an item more or less."""
    *items, spare = some_items(rng, 3, 6)
    shown = ", ".join(items)
    kind = rng.choice(["add", "remove", "swap"])
    if kind == "add":
        asked = [f"Add {spare} to this list: {shown}", f"Put {spare} at the end of this list: {shown}"]
        return Turn(question=rng.choice(asked), answer=", ".join([*items, spare]), content=(kind, spare, *items))
    item = rng.choice(items)
    if kind == "remove":
        asked = [f"Remove {item} from this list: {shown}", f"Write this list without {item}: {shown}"]
        rest = [other for other in items if other != item]
        return Turn(question=rng.choice(asked), answer=", ".join(rest), content=(kind, item, *items))
    asked = [f"Replace {item} with {spare}: {shown}", f"In this list, change {item} to {spare}: {shown}"]
    answer = ", ".join(spare if other == item else other for other in items)
    return Turn(question=rng.choice(asked), answer=answer, content=(kind, item, spare, *items))


def spelling(rng: Random) -> Turn:
    """Ask for the letters of a word."""
    word = rng.choice(some_items(rng, 1, 1))
    number = NUMBER_WORDS[len(word)]
    cases = [
        ([f"Spell the word {word}.", f"How do you spell {word}?"], "-".join(word.lower()), "spell"),
        ([f"How many letters does {word} have?", f"How many letters are in {word}?"],
         f"The word {word} has {number} letters.", "letters"),
        ([f"What is the first letter of {word}?", f"Which letter does {word} begin with?"],
         f"The word {word} begins with {word[0].lower()}.", "initial"),
        ([f"What is the last letter of {word}?", f"Which letter does {word} end with?"],
         f"The word {word} ends with {word[-1]}.", "final"),
        ([f"Write {word} in capital letters.", f"Write {word} in upper case."], word.upper(), "upper"),
        ([f"Write {word.upper()} in small letters.", f"Write {word.upper()} in lower case."], word.lower(), "lower"),
    ]  # fmt: skip
    asked, answer, kind = rng.choice(cases)
    return Turn(question=rng.choice(asked), answer=answer, content=(kind, word))


def rewritten(rng: Random) -> Turn:
    """Ask for a sentence in another form."""
    name, verb = rng.choice(NAMES), rng.choice(_VERBS)
    place, adjective, noun = rng.choice(PLACES), rng.choice(ADJECTIVES), rng.choice(OBJECTS)
    third = verb[:-1] + "ies" if verb == "study" else verb + "s"
    present, past = f"{name} {third} in the {place}.", f"{name} {facts.PAST_TENSES[verb]} in the {place}."
    thing, things = f"The {noun} is {adjective}.", f"The {plural(noun)} are {adjective}."
    cases = [
        ("past", present, past, ["Write this in the past tense", "Change this sentence to the past"]),
        ("present", past, present, ["Write this in the present tense", "Change this sentence to the present"]),
        ("question", present, f"Does {name} {verb} in the {place}?", ["Make this a question",
        "Turn this into a question"]),
        ("negative", present, f"{name} does not {verb} in the {place}.", ["Make this negative",
        "Write the negative form"]),
        ("plural", thing, things, ["Write this in the plural", "Change this sentence to the plural"]),
        ("singular", things, thing, ["Write this in the singular", "Change this sentence to the singular"]),
        ("question", thing, f"Is the {noun} {adjective}?", ["Make this a question", "Turn this into a question"]),
        ("negative", thing, f"The {noun} is not {adjective}.", ["Make this negative", "Write the negative form"]),
        ("upper", thing, thing.upper(), ["Write this in capital letters", "Write this in upper case"]),
    ]  # fmt: skip
    kind, before, after, asked = rng.choice(cases)
    return Turn(question=f"{rng.choice(asked)}: {before}", answer=after, content=("rewrite", kind, before))


def repeated(rng: Random) -> Turn:
    """Ask for words to be said again, or several times."""
    noun, adjective = rng.choice(OBJECTS), rng.choice(ADJECTIVES)
    if rng.random() < 0.5:
        number = rng.randint(2, 5)
        asked = [f"Say {noun} {NUMBER_WORDS[number]} times.", f"Write the word {noun} {NUMBER_WORDS[number]} times."]
        return Turn(question=rng.choice(asked), answer=" ".join([noun] * number), content=("times", noun, number))
    text = rng.choice([
        f"The {adjective} {noun} belongs to {rng.choice(NAMES)}.",
        f"{rng.choice(NAMES)} has {article(adjective)} {noun}.",
        f"{capitalized(noun)}, {rng.choice(ANIMALS_LIST)}, {rng.choice(COLOURS)}.",
    ])  # fmt: skip
    asked = [f"Repeat after me: {text}", f"Say this again: {text}", f"Repeat: {text}"]
    return Turn(question=rng.choice(asked), answer=text, content=("repeat", text))


def named_things(rng: Random) -> Turn:
    """Ask for some things of a kind."""
    kind, pool = rng.choice(list(_KINDS_OF_THINGS.items()))
    number = rng.randint(2, 5)
    word = NUMBER_WORDS[number]
    letter = rng.choice(rng.choice(pool)).lower() if rng.random() < 0.3 else ""
    fitting = [item for item in pool if item[0].lower() == letter]
    if letter and fitting:
        one = kind[:-3] + "y" if kind.endswith("ies") else kind[:-1]
        return Turn(
            question=rng.choice(
                [f"Name {article(one)} that begins with {letter}.", f"Tell me {article(one)} with {letter}."]
            ),
            answer=f"{capitalized(rng.choice(fitting))}.",
            content=("letter", kind, letter),
        )
    asked = [
        f"Name {word} {kind}.",
        f"Give me {word} {kind}.",
        f"List {word} {kind}.",
        f"Tell me {word} {kind}, please.",
    ]
    asked += [f"Can you name {word} {kind}?", f"I need {word} {kind}.", f"Write down {word} {kind}."]
    question = rng.choice(asked)
    answer = capitalized(listed(rng.sample(pool, number))) + "."
    return Turn(question=question, answer=answer, content=("name", kind, number, question))


def passage(rng: Random) -> Turn:
    """Tell of two people, and ask about one."""
    people = rng.sample(NAMES, 2)
    cities, jobs = rng.sample(CITIES, 2), rng.sample(JOBS, 2)
    pets, shades = rng.sample(ANIMALS_LIST, 2), rng.sample(COLOURS, 2)
    index = rng.randrange(2)
    name = people[index]
    cases = [
        ("lives in {}", cities, f"Where does {name} live?", f"{name} lives in {cities[index]}."),
        ("lives in {}", cities, f"Who lives in {cities[index]}?", f"{name} lives in {cities[index]}."),
        ("is a {}", jobs, f"What is the job of {name}?", f"{name} is {article(jobs[index])}."),
        ("is a {}", jobs, f"Who is the {jobs[index]}?", f"{name} is the {jobs[index]}."),
        ("has a {}", pets, f"Which animal does {name} have?", f"{name} has {article(pets[index])}."),
        ("has a {}", pets, f"Who has the {pets[index]}?", f"{name} has the {pets[index]}."),
        ("wears a {} hat", shades, f"What colour is the hat of {name}?", f"The hat of {name} is {shades[index]}."),
        ("wears a {} hat", shades, f"Who wears a {shades[index]} hat?", f"{name} wears {article(shades[index])} hat."),
    ]
    form, values, asked, answer = rng.choice(cases)
    told = [f"{person} {_with_article(form, value)}." for person, value in zip(people, values, strict=True)]
    text = f"{' '.join(told)} {asked.replace(' a orange', ' an orange')}"
    by_name = name in asked
    short = values[index] if by_name else name
    return Turn(question=text, answer=answer, content=("passage", *people, *values, by_name, index), short=short)


def story(rng: Random) -> Turn:
    """Ask for a sentence or a very short story about given things."""
    name, other = rng.sample(NAMES, 2)
    pet, noun, place = rng.choice(ANIMALS_LIST), rng.choice(OBJECTS), rng.choice(PLACES)
    adjective = rng.choice(ADJECTIVES)
    if rng.random() < 0.5:
        asked = [
            f"Write a sentence with {pet} and {noun}.",
            f"Make a sentence about {article(pet)} and {article(noun)}.",
        ]
        answer = rng.choice([
            f"The {pet} sleeps beside the {adjective} {noun}.", f"The {adjective} {pet} looks at the {noun}.",
            f"There is {article(pet)} behind the {noun} in the {place}.",
            f"The {pet} found {article(noun)} in the {place}.",
        ])  # fmt: skip
        return Turn(question=rng.choice(asked), answer=answer, content=("sentence", pet, noun))
    asked = [
        f"Tell me a short story about {name} and {article(pet)}.",
        f"Write a short story about {name} and {article(pet)}.",
        f"Tell a story with {name} and {article(pet)}.",
    ]  # fmt: skip
    begin = rng.choice([
        f"One day {name} met {article(pet)} in the {place}.", f"{name} had {article(adjective)} {pet}.",
        f"Once {name} saw {article(pet)} near the {place}.",
    ])  # fmt: skip
    middle = rng.choice([
        f"The {pet} had lost its {noun}.", f"The {pet} was hungry.", f"They found {article(adjective)} {noun} there.",
        f"Together they went to see {other}.",
    ])  # fmt: skip
    end = rng.choice([
        f"{name} helped, and they became friends.", "Then they went home and were happy.",
        f"In the evening {other} made soup for all of them.", f"Since that day {name} comes to the {place} every week.",
    ])  # fmt: skip
    return Turn(question=rng.choice(asked), answer=f"{begin} {middle} {end}", content=("story", name, pet))


def _with_article(form: str, value: str) -> str:
    return form.replace("a {}", article(value)) if "a {}" in form else form.format(value)


ANIMALS_LIST = list(ANIMALS)
KINDS: tuple[Callable[[Random], Turn], ...] = (
    sorted_list, counted_list, picked, changed_list, spelling, rewritten, repeated, named_things, passage, story,
)  # fmt: skip
