"""Functions that a model may call: their schemas, what users ask of them, and what they return.

Names of functions and parameters vary from dialogue to dialogue, so that they have to be read from the schema.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from gdn_jax.training.dialogues import facts
from gdn_jax.training.dialogues.dialogue import Content
from gdn_jax.training.dialogues.words import (
    CITIES,
    DAYS,
    FOODS,
    FRUITS,
    NAMES,
    PLACES,
    SUBJECTS,
    VEGETABLES,
    article,
    capitalized,
    counted,
    listed,
    plural,
)

Values = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a function.

    Attributes:
        question: what the user asks.
        arguments: of the call, by the first of each parameter's names.
        result: what the function returns.
        answer: what the assistant makes of it.
        content: what the question is about.
        vague: what the user might ask first, with an argument missing; empty if that makes no sense.
        back: what the assistant then asks.
        reply: what the user says to that.
    """

    question: str
    arguments: Values
    result: Mapping[str, object]
    answer: str
    content: Content
    vague: str = ""
    back: str = ""
    reply: str = ""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function in all its names.

    Attributes:
        names: of the function.
        about: descriptions.
        parameters: names of each parameter, and its JSON type.
        draw: draws a use.
        topic: what it is for, in the words of a refusal by one who lacks it.
    """

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str], ...]
    draw: Callable[[Random], Use]
    topic: str

    def named(self, rng: Random) -> "NamedFunction":
        """Draw the names that it has in one dialogue."""
        keys = {names[0]: rng.choice(names) for names, _ in self.parameters}
        schema = {
            "name": rng.choice(self.names),
            "description": rng.choice(self.about),
            "parameters": {
                "type": "object",
                "properties": {keys[names[0]]: {"type": kind} for names, kind in self.parameters},
                "required": [keys[names[0]] for names, _ in self.parameters],
            },
        }
        return NamedFunction(function=self, schema=schema, keys=keys)


@dataclass(frozen=True, kw_only=True)
class NamedFunction:
    """A function under the names of one dialogue."""

    function: Function
    schema: Mapping[str, object]
    keys: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, use: Use) -> dict[str, object]:
        """Return a use's arguments under this dialogue's names."""
        return {self.keys[name]: value for name, value in use.arguments.items()}


def weather_result(rng: Random, city: str) -> dict[str, object]:
    """Draw the weather of a city."""
    sky = rng.choice(_SKIES)
    return {"city": city, "temperature": rng.randint(-10, 0 if sky == "snowy" else 38), "sky": sky}


def weather(rng: Random) -> Use:
    """Draw a question for the weather."""
    city = rng.choice(CITIES)
    result = weather_result(rng, city)
    asked = [
        f"What is the weather in {city}?", f"How is the weather in {city}?", f"What is it like in {city} today?",
        f"How warm is it in {city}?", f"Tell me the weather in {city}.", f"Do I need a coat in {city}?",
        f"Weather in {city}, please.", f"Is it sunny in {city}?",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"city": city},
        result=result,
        answer=f"It is {result['sky']} in {city}, with {result['temperature']} degrees.",
        content=("weather", city),
        vague=rng.choice(["What is the weather?", "How is the weather today?", "Is it warm?"]),
        back="For which city?",
        reply=rng.choice([city, f"In {city}.", f"{city}, please."]),
    )


def timer(rng: Random) -> Use:
    """Draw a wish for a timer."""
    minutes = rng.randint(1, 120)
    span, food = counted(minutes, "minute"), rng.choice(FOODS)
    asked = [
        f"Set a timer for {span}.", f"Start a timer of {span}.", f"Please time {span}.", f"Timer: {span}",
        f"Wake me in {span}.", f"I cook {food}. Call me after {span}.", f"Can you set a timer for {span}?",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"minutes": minutes},
        result={"status": "started", "minutes": minutes},
        answer=f"The timer is set for {span}.",
        content=("timer", minutes),
        vague=rng.choice(["Set a timer.", "Start a timer, please.", "I need a timer."]),
        back="For how many minutes?",
        reply=rng.choice([f"{minutes}", f"For {span}.", span]),
    )


def calculation(rng: Random) -> Use:
    """Draw a sum that is too large for the head."""
    left, right = rng.randint(100, 9999), rng.randint(10, 999)
    sign, word = rng.choice([("+", "plus"), ("-", "minus"), ("*", "times")])
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    asked = [
        f"What is {left} {sign} {right}?", f"How much is {left} {word} {right}?", f"Calculate {left} {sign} {right}.",
        f"I need {left} {word} {right}.", f"Please work out {left} {sign} {right}.",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"expression": f"{left} {sign} {right}"},
        result={"result": value},
        answer=f"{left} {sign} {right} is {value}.",
        content=("calculate", left, sign, right),
    )


def search(rng: Random) -> Use:
    """Draw a question that needs a search."""
    country, city, name = rng.choice(list(facts.CAPITALS)), rng.choice(CITIES), rng.choice(NAMES)
    place, year = rng.choice(PLACES), rng.randint(1500, 2020)
    query, question, text = rng.choice([
        (f"oldest {place} in {city}", f"Which is the oldest {place} in {city}?",
        f"The oldest {place} in {city} is from {year}."),
        (f"people in {country}", f"How many people live in {country}?",
        f"{country} has {rng.randint(2, 90)} million people."),
        (f"mayor of {city}", f"Who is the mayor of {city}?", f"The mayor of {city} is {name}."),
        (f"opening hours {place} {city}", f"When does the {place} in {city} open?",
         f"The {place} in {city} opens at {rng.randint(7, 11)}."),
        (f"ticket price {place} {city}", f"What does a ticket for the {place} in {city} cost?",
         f"A ticket costs {rng.randint(2, 30)} euros."),
    ])  # fmt: skip
    before = rng.choice(["", "", "Search the web: ", "Please look up: ", "Find out: "])
    return Use(
        question=before + question,
        arguments={"query": query},
        result={"text": text},
        answer=text,
        content=("search", query),
    )


def event(rng: Random) -> Use:
    """Draw a wish for an entry in the calendar."""
    day, hour = rng.choice(DAYS), f"{rng.randint(7, 21)}:{rng.choice(['00', '15', '30', '45'])}"
    title = rng.choice([f"lunch with {rng.choice(NAMES)}", f"{rng.choice(SUBJECTS)} lesson",
    f"meeting with {rng.choice(NAMES)}",
                        "dentist", f"call {rng.choice(NAMES)}", "football", f"visit {rng.choice(NAMES)}"])  # fmt: skip
    asked = [
        f"Add {title} to my calendar on {day} at {hour}.", f"Put {title} on {day} at {hour}.",
        f"Please note: {title}, {day}, {hour}.", f"On {day} at {hour} I have {title}. Add it to my calendar.",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"title": title, "day": day, "time": hour},
        result={"status": "added", "id": rng.randint(100, 999)},
        answer=f"I added {title} on {day} at {hour}.",
        content=("event", title, day, hour),
        vague=rng.choice([f"Add {title} to my calendar on {day}.", f"Put {title} on {day}."]),
        back="At what time?",
        reply=rng.choice([f"At {hour}.", hour]),
    )


def conversion(rng: Random) -> Use:
    """Draw a wish for a number in another unit."""
    start, end, factor = rng.choice(_UNITS)
    value = rng.randint(1, 500)
    result = value * factor
    asked = [
        f"Convert {value} {start} to {end}.", f"How many {end} are {value} {start}?",
        f"What is {value} {start} in {end}?",
        f"{value} {start} in {end}, please.",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"value": value, "from_unit": start, "to_unit": end},
        result={"value": result, "unit": end},
        answer=f"{value} {start} are {result} {end}.",
        content=("convert", value, start, end),
        vague=f"Convert {value} {start}.",
        back="To which unit?",
        reply=rng.choice([f"To {end}.", end]),
    )


def clock(rng: Random) -> Use:
    """Draw a question for the time."""
    city, hour = rng.choice(CITIES), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    asked = [
        f"What time is it in {city}?", f"How late is it in {city}?", f"Tell me the time in {city}.",
        f"Time in {city}?", f"What does the clock say in {city}?",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"city": city},
        result={"time": hour},
        answer=f"It is {hour} in {city}.",
        content=("clock", city),
        vague=rng.choice(["What time is it?", "Tell me the time."]),
        back="In which city?",
        reply=rng.choice([city, f"In {city}."]),
    )


def message(rng: Random) -> Use:
    """Draw a wish to send a message."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    text = rng.choice([
        "I am late", "See you soon", "Happy birthday", f"I am at the {place}", "Call me back",
        f"Meet me at the {place}",
        f"Please bring {rng.choice(FOODS)}", f"Dinner is at {rng.randint(5, 9)}", f"I am in {rng.choice(CITIES)}",
    ])  # fmt: skip
    asked = [
        f'Send {name} the message "{text}".', f"Write to {name}: {text}", f'Tell {name} "{text}".',
        f"Send a message to {name}: {text}",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"to": name, "text": text},
        result={"status": "sent"},
        answer=f"I sent your message to {name}.",
        content=("message", name, text),
        vague=rng.choice([f"Send a message to {name}.", f"Write to {name}."]),
        back="What should it say?",
        reply=text,
    )


def music(rng: Random) -> Use:
    """Draw a wish for music."""
    kind = rng.choice(["jazz", "rock", "pop", "folk", "classical", "piano", "dance", "quiet", "happy", "sad"])
    name = rng.choice(NAMES)
    wish = rng.choice([f"{kind} music", f"songs by {name}", f"{kind} songs"])
    asked = [f"Play {wish}.", f"I want to hear {wish}.", f"Put on {wish}, please.", f"Can you play {wish}?"]
    return Use(
        question=rng.choice(asked),
        arguments={"query": wish},
        result={"status": "playing"},
        answer=f"Now playing {wish}.",
        content=("music", wish),
        vague=rng.choice(["Play some music.", "Put on music."]),
        back="What would you like to hear?",
        reply=rng.choice([capitalized(wish), f"{capitalized(wish)}, please."]),
    )


def list_item(rng: Random) -> Use:
    """Draw a wish for a thing on the shopping list."""
    noun, number = rng.choice(FRUITS + VEGETABLES), rng.randint(1, 12)
    goods = counted(number, noun)
    asked = [
        f"Add {goods} to my shopping list.", f"Put {goods} on the list.", f"I need to buy {goods}.",
        f"Please write {goods} on my shopping list.",
    ]  # fmt: skip
    total = rng.randint(1, 20)
    return Use(
        question=rng.choice(asked),
        arguments={"item": noun, "quantity": number},
        result={"status": "added", "items": total},
        answer=f"I added {goods}. The list has {counted(total, 'item')} now.",
        content=("list", noun, number),
        vague=f"Put {plural(noun)} on the list.",
        back=f"How many {plural(noun)}?",
        reply=f"{number}",
    )


def light(rng: Random) -> Use:
    """Draw a wish for light or darkness."""
    room = rng.choice(["kitchen", "bedroom", "bathroom", "hall", "office", "garage", "garden", "cellar", "attic"])
    state = rng.choice(["on", "off"])
    asked = [
        f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}.",
        f"Light {state} in the {room}, please.",
        f"Please turn the light {state} in the {room}.",
    ]  # fmt: skip
    return Use(
        question=rng.choice(asked),
        arguments={"room": room, "state": state},
        result={"status": "ok"},
        answer=f"The light in the {room} is {state}.",
        content=("light", room, state),
        vague=f"Turn the light {state}.",
        back="In which room?",
        reply=rng.choice([f"In the {room}.", f"The {room}."]),
    )


def shops(rng: Random) -> Use:
    """Draw a question for places in a city."""
    kind, city = rng.choice(["bakery", "cafe", "hotel", "museum", "library", "cinema", "pharmacy"]), rng.choice(CITIES)
    found = [f"{rng.choice(NAMES)}'s {capitalized(kind)}" for _ in range(rng.randint(1, 3))]
    found = list(dict.fromkeys(found))
    asked = [
        f"Find {article(kind)} in {city}.",
        f"Where is {article(kind)} in {city}?",
        f"Is there {article(kind)} in {city}?",
    ]
    return Use(
        question=rng.choice(asked),
        arguments={"kind": kind, "city": city},
        result={"places": found},
        answer=f"In {city} there {'is' if len(found) == 1 else 'are'} {listed(found)}.",
        content=("places", kind, city),
        vague=f"Find {article(kind)}.",
        back="In which city?",
        reply=rng.choice([city, f"In {city}."]),
    )


_SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]
_UNITS = [
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("kilograms", "grams", 1000), ("hours",
    "minutes", 60),
    ("minutes", "seconds", 60), ("weeks", "days", 7), ("days", "hours", 24), ("litres", "millilitres", 1000),
    ("years", "months", 12), ("tonnes", "kilograms", 1000),
]  # fmt: skip
_CITY = (("city", "place", "location"), "string")
FUNCTIONS = (
    Function(names=("get_weather", "weather", "current_weather"), about=("Weather in a city", "Current weather"),
             parameters=(_CITY,), draw=weather, topic="see the weather"),
    Function(names=("set_timer", "start_timer", "timer"), about=("Start a timer", "Set a timer in minutes"),
             parameters=((("minutes", "duration", "length"), "integer"),), draw=timer, topic="set a timer"),
    Function(names=("calculate", "calculator", "compute"), about=("Work out an expression", "Calculator"),
             parameters=((("expression", "formula", "input"), "string"),), draw=calculation, topic="use a calculator"),
    Function(names=("search", "web_search", "look_up"), about=("Search the web", "Find facts"),
             parameters=((("query", "text", "question"), "string"),), draw=search, topic="search the web"),
    Function(names=("add_event", "create_event", "calendar_add"), about=("Add to the calendar", "New calendar entry"),
             parameters=((("title", "name", "what"), "string"), (("day", "date"), "string"), (("time",
             "start"), "string")),
             draw=event, topic="open your calendar"),
    Function(names=("convert_units", "convert", "unit_converter"), about=("Convert units",
    "Change the unit of a value"),
             parameters=((("value", "number", "amount"), "number"), (("from_unit", "from", "source"), "string"),
                         (("to_unit", "to", "target"), "string")), draw=conversion, topic="convert units"),
    Function(names=("get_time", "local_time", "clock"), about=("Time in a city", "Local time"),
             parameters=(_CITY,), draw=clock, topic="see a clock"),
    Function(names=("send_message", "message", "send_text"), about=("Send a message", "Write to a person"),
             parameters=((("to", "recipient", "person"), "string"), (("text", "body", "content"), "string")),
             draw=message, topic="send messages"),
    Function(names=("play_music", "play", "music_player"), about=("Play music", "Start a song"),
             parameters=((("query", "song", "what"), "string"),), draw=music, topic="play music"),
    Function(names=("add_to_list", "add_item", "shopping_list"), about=("Add to the shopping list", "New item to buy"),
             parameters=((("item", "product", "name"), "string"), (("quantity", "number", "count"), "integer")),
             draw=list_item, topic="write on your shopping list"),
    Function(names=("set_light", "switch_light", "light"), about=("Turn a light on or off", "Switch a light"),
             parameters=((("room", "place", "where"), "string"), (("state", "value", "mode"), "string")),
             draw=light, topic="switch lights"),
    Function(names=("find_places", "places", "nearby"), about=("Find places in a city", "Search for places"),
             parameters=((("kind", "type", "category"), "string"), _CITY), draw=shops, topic="find places"),
)  # fmt: skip
