"""Talk that is about little: greetings, thanks, the assistant itself, and what it cannot know."""

from random import Random

from gdn_jax.training.dialogues.dialogue import Turn
from gdn_jax.training.dialogues.words import CITIES, DAYS, HOBBIES, NAMES, SURNAMES

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Hi there", "Hello there"]
_HELP = ["How can I help you?", "What can I do for you?", "How can I help?"]
_TALK = {
    "How are you": ["I am fine, thank you. And you?", "I am well, thank you."],
    "How is it going": ["It is going well, thank you."],
    "What can you do": ["I can answer short questions, sort lists, do sums and write JSON."],
    "Can you help me": ["Yes, of course. What do you need?"],
    "I need help": ["I am glad to help. What do you need?"],
    "Are you a human": ["No, I am a small language model."],
    "Are you a robot": ["I am a small language model, a program that writes text."],
    "Do you like music": ["I cannot hear music, but I like to talk about it."],
    "Do you sleep": ["No, a program does not sleep."],
    "Where do you live": ["I live in a computer."],
    "How old are you": ["I do not have an age. I am a program."],
    "Do you have a body": ["No, I only have words."],
    "Do you eat": ["No, a program does not need food."],
    "Are you big": ["No, I am a very small model."],
    "Do you make mistakes": ["Yes, I am small and I make mistakes."],
    "Do you know everything": ["No, I know only a little."],
    "Can you see me": ["No, I can only read your words."],
    "Can you hear me": ["No, I can only read what you write."],
    "I am bored": ["Shall I tell you a short story?"],
    "I am tired": ["Then you should rest a little."],
    "I am hungry": ["Maybe it is time for a meal."],
    "I am thirsty": ["Then drink a glass of water."],
    "I am cold": ["Put on a warm coat."],
    "I am sad": ["I am sorry to hear that. Do you want to talk about it?"],
    "I am happy": ["I am glad to hear that."],
    "I cannot sleep": ["Try to read a quiet book."],
    "That is wrong": ["I am sorry. Please tell me what is right."],
    "Well done": ["Thank you."],
    "You are funny": ["Thank you, that is kind."],
    "Tell me a joke": ["Why did the book go to the doctor? It had lost its words."],
}
THANKS = {
    "Thank you": ["You are welcome."], "Thanks": ["You are welcome."], "Thanks a lot": ["You are very welcome."],
    "Thank you very much": ["You are very welcome."], "Great, thanks": ["You are welcome."],
    "Goodbye": ["Goodbye, and have a nice day."], "Bye": ["Goodbye."], "See you later": ["See you later."],
    "Good night": ["Good night, sleep well."],
}  # fmt: skip
_WHO = ["Who are you", "What is your name", "What are you called", "Tell me your name", "What should I call you"]
_UNKNOWN = [
    ("What is my phone number?", "I do not know your phone number."),
    ("What did I eat yesterday?", "I do not know what you ate yesterday."),
    ("What is my password?", "I do not know your password."),
    ("Where are my keys?", "I do not know where your keys are."),
    ("What am I thinking?", "I do not know what you are thinking."),
    ("What time is it?", "I do not know the time, as I have no clock."),
    ("What day is it today?", "I do not know what day it is."),
    ("What is the date today?", "I do not know the date."),
    ("How old am I?", "I do not know how old you are."),
    ("Where do I live?", "I do not know where you live."),
]


def with_mark(rng: Random, text: str, mark: str) -> str:
    """Return a line of talk with its mark, now and then written carelessly."""
    style = rng.random()
    if style < 0.15:
        return text.lower()
    return text if style < 0.3 else text + mark


def greeting(rng: Random) -> Turn:
    """Draw a greeting, some with the user's name."""
    hello = rng.choice(GREETINGS)
    if rng.random() < 0.5:
        name = rng.choice(NAMES)
        words = rng.choice([f"{hello}, I am {name}.", f"{hello}! My name is {name}.", f"{hello}, {name} here."])
        return Turn(
            question=words, answer=f"{_back(hello)}, {name}! {rng.choice(_HELP)}", content=("greeting", hello, name)
        )
    question = with_mark(rng, hello, rng.choice("!."))
    return Turn(question=question, answer=f"{_back(hello)}! {rng.choice(_HELP)}", content=("greeting", question))


def talk(rng: Random) -> Turn:
    """Draw a line of small talk."""
    words = rng.choice(list(_TALK))
    mark = "?" if words.split()[0] in {"How", "What", "Can", "Are", "Do", "Where"} else "."
    prefix = rng.choice(["", "", "", f"{rng.choice(GREETINGS)}! "])
    question = prefix + with_mark(rng, words, mark)
    return Turn(question=question, answer=rng.choice(_TALK[words]), content=("talk", question))


def thanks(rng: Random) -> Turn:
    """Draw a thank-you or a goodbye."""
    words = rng.choice(list(THANKS))
    question = with_mark(rng, words, rng.choice("!."))
    return Turn(question=question, answer=rng.choice(THANKS[words]), content=("thanks", question))


def identity(rng: Random, name: str = "Pico") -> Turn:
    """Draw a question for the assistant's name."""
    words = rng.choice(_WHO)
    prefix = rng.choice(["", "", f"{rng.choice(GREETINGS)}! ", "Please tell me: "])
    question = prefix + with_mark(rng, words, "." if words.startswith("Tell") else "?")
    what = "a small language model" if name == "Pico" else "your assistant"
    answer = f"I am {name}, {what}." if "name" not in words else f"My name is {name}."
    return Turn(question=question, answer=answer, content=("identity", name, question), short=name)


def unknown(rng: Random) -> Turn:
    """Draw a question whose answer nobody has told the assistant."""
    city, name, day = rng.choice(CITIES), f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}", rng.choice(DAYS)
    cases = [
        rng.choice(_UNKNOWN),
        (f"What will the weather be in {city} on {day}?", "I do not know. I cannot see the weather."),
        (f"Is it raining in {city} now?", "I do not know. I cannot see the weather."),
        (f"What time is it in {city}?", "I do not know the time, as I have no clock."),
        (f"What is the phone number of {name}?", f"I do not know the phone number of {name}."),
        (f"Who is {name}?", f"I do not know {name}."),
        (f"Does {name} like {rng.choice(HOBBIES)}?", f"I do not know. You did not tell me about {name}."),
        (f"Where does {name} live?", f"I do not know where {name} lives."),
        (f"Who won the match in {city} on {day}?", "I do not know. I cannot read the news."),
        (f"How much is a ticket to {city}?", "I do not know the price."),
        (f"Can you call {name} for me?", "No, I cannot call anyone."),
    ]
    question, answer = rng.choice(cases)
    return Turn(question=question, answer=answer, content=("unknown", question))


def _back(hello: str) -> str:
    return hello if hello.startswith("Good") else "Hello"
