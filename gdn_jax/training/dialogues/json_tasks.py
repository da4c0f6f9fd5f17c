"""Tasks whose answer is JSON and nothing else."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gdn_jax.training.dialogues.dialogue import Content, Dialogue, Message, say
from gdn_jax.training.dialogues.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    STREETS,
    SUBJECTS,
    article,
    capitalized,
    counted,
    listed,
    some_items,
)

Json = dict[str, object]
_SYSTEMS = [
    "Answer with JSON only.",
    "You write JSON.",
    "Reply in JSON, without any other text.",
    "You are Pico, a helpful assistant.",
]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A sentence and the values in it.

    Attributes:
        text: the sentence.
        values: by key, in no order that matters.
    """

    text: str
    values: Json


def dialogue(rng: Random) -> Dialogue:
    """Draw one task, or two in a row."""
    messages: list[Message] = []
    contents: list[Content] = []
    if rng.random() < 0.25:
        messages.append(say("system", rng.choice(_SYSTEMS)))
    for _ in range(rng.choice([1, 1, 1, 1, 2])):
        question, value = rng.choice(_KINDS)(rng)
        answer = _written(value)
        messages += [say("user", question), say("assistant", answer)]
        contents.append(("json", *_leaves(value)))
    return Dialogue(messages=tuple(messages), contents=tuple(contents), domain="json")


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _leaves(value: object) -> tuple[str | int, ...]:
    """Return the values of a JSON text without its keys, in an order that does not depend on theirs."""
    if isinstance(value, dict):
        return tuple(leaf for leaves in sorted(map(_leaves, value.values()), key=repr) for leaf in leaves)
    if isinstance(value, list):
        return tuple(leaf for item in value for leaf in _leaves(item))
    return (_written(value),)


def _person(rng: Random) -> Record:
    name, age, city, job, hobby = (
        rng.choice(NAMES), rng.randint(5, 95), rng.choice(CITIES), rng.choice(JOBS), rng.choice(HOBBIES),
    )  # fmt: skip
    parts: dict[str, tuple[object, str]] = {
        "age": (age, f"is {age} years old"), "city": (city, f"lives in {city}"), "job": (job,
        f"works as {article(job)}"),
        "hobby": (hobby, f"likes {hobby}"),
    }  # fmt: skip
    chosen = rng.sample(list(parts), rng.randint(1, 3))
    return Record(
        text=f"{name} {listed([parts[key][1] for key in chosen])}.",
        values={"name": name, **{key: parts[key][0] for key in chosen}},
    )


def _order(rng: Random) -> Record:
    noun, number, price, name = rng.choice(OBJECTS), rng.randint(1, 40), rng.randint(1, 99), rng.choice(NAMES)
    goods = counted(number, noun)
    return rng.choice([
        Record(text=f"{name} bought {goods}.", values={"customer": name, "item": noun, "quantity": number}),
        Record(text=f"{name} orders {goods} for {price} euros each.",
               values={"customer": name, "item": noun, "quantity": number, "price": price}),
        Record(text=f"{capitalized(article(noun))} costs {price} euros.", values={"item": noun, "price": price}),
        Record(text=f"There are {counted(number + 1, noun)} in the shop.", values={"item": noun,
        "quantity": number + 1}),
    ])  # fmt: skip


def _thing(rng: Random) -> Record:
    noun, shade, weight, owner = rng.choice(OBJECTS), rng.choice(COLOURS), rng.randint(1, 900), rng.choice(NAMES)
    return rng.choice([
        Record(text=f"The {noun} is {shade} and weighs {weight} grams.",
               values={"object": noun, "colour": shade, "weight": weight}),
        Record(text=f"{owner} owns {article(shade)} {noun}.", values={"owner": owner, "object": noun, "colour": shade}),
        Record(text=f"The {shade} {noun} belongs to {owner}.", values={"owner": owner, "object": noun,
        "colour": shade}),
    ])  # fmt: skip


def _pet(rng: Random) -> Record:
    name, owner, kind, age = rng.choice(NAMES), rng.choice(NAMES), rng.choice(list(ANIMALS)), rng.randint(2, 20)
    return rng.choice([
        Record(text=f"{owner} has {article(kind)} named {name}.", values={"owner": owner, "animal": kind,
        "name": name}),
        Record(text=f"{name} is {article(kind)} and {age} years old.", values={"name": name, "animal": kind,
        "age": age}),
    ])  # fmt: skip


def _meeting(rng: Random) -> Record:
    day, hour, city = (
        rng.choice(DAYS),
        f"{rng.randint(8, 20)}:{rng.choice(['00', '15', '30', '45'])}",
        rng.choice(CITIES),
    )
    subject, name = rng.choice(SUBJECTS), rng.choice(NAMES)
    return rng.choice([
        Record(text=f"The {subject} lesson is on {day} at {hour}.", values={"subject": subject, "day": day,
        "time": hour}),
        Record(text=f"{name} flies to {city} on {day}.", values={"name": name, "city": city, "day": day}),
        Record(text=f"On {day} at {hour} {name} meets us in {city}.",
               values={"name": name, "day": day, "time": hour, "city": city}),
    ])  # fmt: skip


_RECORDS: tuple[Callable[[Random], Record], ...] = (_person, _person, _order, _thing, _pet, _meeting)


def _record(rng: Random) -> Record:
    return rng.choice(_RECORDS)(rng)


def _some_keys(rng: Random, values: Json) -> list[str]:
    keys = list(values)
    return rng.sample(keys, rng.randint(max(1, len(keys) - 2), len(keys)))


def _from_sentence(rng: Random) -> tuple[str, Json]:
    record = _record(rng)
    keys = _some_keys(rng, record.values)
    shown = listed(keys)
    asked = rng.choice([
        f"Give me a JSON object with {shown}: {record.text}",
        f"Write JSON with the key{'' if len(keys) == 1 else 's'} {shown}. {record.text}",
        f"{record.text} Give me {shown} as JSON.", f"Make a JSON object with {shown} from this: {record.text}",
        f'Extract {shown} as JSON: "{record.text}"', f"Turn this into JSON with {shown}: {record.text}",
    ])  # fmt: skip
    return asked, {key: record.values[key] for key in keys}


def _schema_filled(rng: Random) -> tuple[str, Json]:
    record = _record(rng)
    keys = _some_keys(rng, record.values)
    absent = [key for key in ("email", "phone", "country") if rng.random() < 0.15]
    schema = {key: "number" if isinstance(record.values[key], int) else "string" for key in keys}
    schema |= {key: "string or null" for key in absent}
    asked = rng.choice([
        f"Fill this schema: {_written(schema)}\n{record.text}", f"Schema: {_written(schema)}\nText: {record.text}",
        f"{record.text}\nAnswer in this form: {_written(schema)}",
        f"Use the schema {_written(schema)} for: {record.text}",
    ])  # fmt: skip
    return asked, {key: record.values.get(key) for key in schema}


def _array(rng: Random) -> tuple[str, list[object]]:
    items: list[object] = [*some_items(rng, 2, 6)]
    if rng.random() < 0.3:
        items = [rng.randint(0, 999) for _ in range(rng.randint(2, 6))]
    shown = ", ".join(map(str, items))
    asked = rng.choice([
        f"Convert this list to JSON: {shown}", f"Write as a JSON array: {shown}", f"Make a JSON list of {shown}.",
        f"JSON array of these: {shown}", "Turn these lines into a JSON array:\n" + "\n".join(map(str, items)),
    ])  # fmt: skip
    return asked, items


def _keyed_array(rng: Random) -> tuple[str, Json]:
    key, items = rng.choice(["items", "values", "list", "words"]), some_items(rng, 2, 5)
    asked = rng.choice([
        f'Give me a JSON object with the list "{key}": {", ".join(items)}',
        f'Put {listed(items)} under the key "{key}" in JSON.',
    ])  # fmt: skip
    return asked, {key: items}


def _lines(rng: Random) -> tuple[str, Json]:
    values = _record(rng).values
    if rng.random() < 0.4:
        values |= {rng.choice(["active", "paid", "new", "open"]): rng.random() < 0.5}
    separator = rng.choice([": ", " = "])
    shown = [f"{key}{separator}{value if isinstance(value, str) else _written(value)}" for key, value in values.items()]
    head = rng.choice(["Convert to JSON:", "Make JSON of this:", "As a JSON object:", "Write this as JSON:"])
    return f"{head}\n" + "\n".join(shown), values


def _table(rng: Random) -> tuple[str, list[Json]]:
    kind = rng.choice(_RECORDS)
    first = kind(rng).values
    rows = [first]
    while len(rows) < 2:
        row = kind(rng).values
        if set(row) == set(first):
            rows.append({key: row[key] for key in first})
    shown = [",".join(first), *[",".join(map(str, row.values())) for row in rows]]
    return rng.choice(["Convert this CSV to JSON:", "CSV to JSON:", "Make a JSON list of objects:"]) + "\n" + "\n".join(
        shown
    ), rows


def _renamed(rng: Random) -> tuple[str, Json]:
    values = _record(rng).values
    old = rng.choice(list(values))
    new = f"{rng.choice(['full', 'first', 'new', 'main', 'my'])}_{old}"
    asked = rng.choice([f'Rename the key "{old}" to "{new}": ', f'Change the key "{old}" into "{new}" in '])
    return asked + _written(values), {new if key == old else key: value for key, value in values.items()}


def _restyled(rng: Random) -> tuple[str, Json]:
    values = _record(rng).values
    kind = rng.randrange(3)
    if kind == 0:
        before = {key.upper(): value for key, value in values.items()}
        return f"Write the keys in lower case: {_written(before)}", values
    if kind == 1:
        return f"Write the keys in capital letters: {_written(values)}", {
            key.upper(): value for key, value in values.items()
        }
    word = rng.choice(["user", "item", "data"])
    snake = {f"{word}_{key}": value for key, value in values.items()}
    camel = {f"{word}{capitalized(key)}": value for key, value in values.items()}
    if rng.random() < 0.5:
        return f"Write the keys in snake case: {_written(camel)}", snake
    return f"Write the keys in camel case: {_written(snake)}", camel


def _repaired(rng: Random) -> tuple[str, Json]:
    values = _record(rng).values
    right = _written(values)
    bare = ", ".join(f"{key}: {_written(value)}" for key, value in values.items())
    slips = [right.replace('"', "'"), right[:-1], right[:-1] + ",}", "{" + bare + "}"]
    slips += [right.replace('": ', '" '), right.replace('", "', '" "')]
    broken = rng.choice(slips)
    if broken == right:  # nothing in it that this slip could break
        broken = right[:-1]
    return rng.choice(["Fix this JSON: ", "Correct this JSON: ", "Make this valid JSON: ", "Repair: "]) + broken, values


def _edited(rng: Random) -> tuple[str, Json]:
    values = _record(rng).values
    key, number = rng.choice(list(values)), rng.randint(1, 999)
    shown = _written(values)
    kind = rng.randrange(3)
    if kind == 0:
        return f'Set "id" to {number} in {shown}', {**values, "id": number}
    if kind == 1:
        return f'Remove the key "{key}" from {shown}', {other: value for other, value in values.items() if other != key}
    value = rng.choice(NAMES) if isinstance(values[key], str) else number
    return f'Change "{key}" to {_written(value)} in {shown}', {**values, key: value}


def _looked_up(rng: Random) -> tuple[str, object]:
    values = _record(rng).values
    key = rng.choice(list(values))
    asked = rng.choice(
        [f'What is the value of "{key}" in {_written(values)}?', f'Give me "{key}" from {_written(values)}']
    )
    if rng.random() < 0.3:
        return f"List the keys of {_written(values)} as a JSON array.", list(values)
    return f"{asked} Answer in JSON.", values[key]


def _nested(rng: Random) -> tuple[str, Json]:
    name, city, street, number = (
        rng.choice(NAMES),
        rng.choice(CITIES),
        f"{rng.choice(STREETS)} Street",
        rng.randint(1, 99),
    )
    kind = rng.randrange(3)
    if kind == 0:
        return (
            f"Give me JSON with name and address (street, number, city): {name} lives at {number} {street} in {city}.",
            {"name": name, "address": {"street": street, "number": number, "city": city}},
        )
    if kind == 1:
        record = rng.choice((_order, _thing))(rng)
        inner = {key: value for key, value in record.values.items() if key not in {"customer", "owner"}}
        keys = listed(list(inner))
        return (
            f"Give me JSON with customer and order ({keys}). Customer: {name}. {record.text}",
            {"customer": name, "order": inner},
        )
    people: list[Json] = [{"name": other, "age": rng.randint(5, 95)} for other in rng.sample(NAMES, 2)]
    told = " ".join(f"{person['name']} is {person['age']}." for person in people)
    return f"Give me JSON with a list people (name, age): {told}", {"people": people}


_KINDS: tuple[Callable[[Random], tuple[str, object]], ...] = (
    _from_sentence, _from_sentence, _from_sentence, _schema_filled, _schema_filled, _array, _keyed_array,
    _lines, _table,
    _renamed, _restyled, _repaired, _repaired, _edited, _looked_up, _nested, _nested,
)  # fmt: skip
