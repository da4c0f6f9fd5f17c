"""Generated dialogues: their answers are worked out again here, and nothing held out is trained on."""

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from operator import add, mul, sub
from pathlib import Path
from random import Random

import pytest

from gdn_jax.training import dialogues
from gdn_jax.training.dialogues import DOMAINS, _chosen, generate
from gdn_jax.training.dialogues.dialogue import Dialogue, is_held_out
from gdn_jax.training.dialogues.glosses import BUILT_IN, read_glosses
from gdn_jax.training.dialogues.words import plural

COUNT = 2000
SIGNS = {"+": add, "-": sub, "*": mul}
FACTORS = {
    "kilometres": 1000, "metres": 100, "kilograms": 1000, "hours": 60, "minutes": 60, "weeks": 7, "days": 24,
    "litres": 1000, "years": 12, "tonnes": 1000,
}  # fmt: skip
JSON_TYPES = {"string": str, "integer": int, "number": (int, float)}


@cache
def drawn(domain: str, *, held_out: bool = False) -> tuple[Dialogue, ...]:
    return tuple(generate(domain, 100 if held_out else COUNT, 5, held_out=held_out))


def text(message: dict[str, object]) -> str:
    return str(message["content"])


def pairs(dialogue: Dialogue) -> list[tuple[str, str]]:
    """Questions and the answers right after them."""
    asked = zip(dialogue.messages, dialogue.messages[1:], strict=False)
    return [(text(first), text(second)) for first, second in asked if first["role"] == "user"]


def plain_chats() -> list[Dialogue]:
    """Chats in which no style is asked for."""
    return [dialogue for dialogue in drawn("chat") if dialogue.messages[0]["role"] == "user"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_dialogue_ends_with_a_short_answer_of_the_assistant(domain: str) -> None:
    lengths = []
    for dialogue in drawn(domain):
        roles = [str(message["role"]) for message in dialogue.messages if message["role"] != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert all(left != right for left, right in pairwise(roles))
        assert dialogue.domain == domain
        answer = text(dialogue.messages[-1])
        assert answer.strip() == answer != ""
        lengths.append(len(answer))
    assert sorted(lengths)[len(lengths) * 9 // 10] < 150  # characters
    assert max(lengths) < 400


@pytest.mark.parametrize("domain", DOMAINS)
def test_nothing_that_is_held_out_is_trained_on(domain: str) -> None:
    train, held_out = drawn(domain), drawn(domain, held_out=True)
    trained_contents = {content for dialogue in train for content in dialogue.contents}
    asked_contents = {dialogue.contents[-1] for dialogue in held_out}
    assert not trained_contents & asked_contents
    assert all(is_held_out(content) for content in asked_contents)
    assert not {repr(dialogue.asked()) for dialogue in train} & {repr(dialogue.asked()) for dialogue in held_out}
    assert len({repr(dialogue.asked()) for dialogue in held_out}) == len(held_out) == 100
    # The last question of a chat, in the same words: what is about the same thing is held out in all its wordings.
    trained_questions = {question for dialogue in train for question, _ in pairs(dialogue)}
    if domain in ("arithmetic", "json"):
        assert not trained_questions & {pairs(dialogue)[-1][0] for dialogue in held_out}


def test_a_sum_is_held_out_in_either_order_and_in_a_story() -> None:
    for dialogue in drawn("arithmetic", held_out=True):
        question, answer = pairs(dialogue)[-1]
        if found := re.match(r"(\d+) [+*] (\d+) =", answer):
            kind, *numbers = dialogue.contents[-1]
            assert kind in ("+", "*")
            assert sorted(map(int, found.groups())) == numbers
            assert all(number in question for number in found.groups())


def test_about_three_in_a_hundred_things_are_held_out() -> None:
    share = sum(is_held_out(("+", left, right)) for left in range(200) for right in range(200)) / 40_000
    assert 0.025 < share < 0.035


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_same_seed_gives_the_same_dialogues_and_another_gives_others(domain: str) -> None:
    assert list(generate(domain, 50, 5)) == list(drawn(domain)[:50])
    assert list(generate(domain, 50, 6)) != list(drawn(domain)[:50])


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_rarely_repeat(domain: str) -> None:
    prompts = Counter(repr(dialogue.asked()) + repr(dialogue.tools) for dialogue in drawn(domain))
    assert max(prompts.values()) <= 3
    assert len(prompts) > 0.95 * COUNT


def test_an_unknown_domain_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="must be one of chat, tools, arithmetic, json; got 'poems'"):
        list(generate("poems", 1, 1))


def test_more_prompts_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogues, "_MOST_DRAWS", 1000)
    trained = next(("x", number) for number in range(100) if not is_held_out(("x", number)))
    hello = Dialogue(messages=({"role": "user", "content": "Hi"},), contents=(trained,))
    drawing = _chosen(lambda rng: hello, Random(1), held_out=False)
    assert [next(drawing) for _ in range(3)] == [hello] * 3
    with pytest.raises(ValueError, match="brought no new prompt"):
        next(drawing)


def test_every_equation_holds() -> None:
    num_checked = 0
    for dialogue in drawn("arithmetic"):
        for message in dialogue.messages:
            words = text(message) + "\n" + str(message.get("reasoning_content", ""))
            for left, value in re.findall(
                r"(\d+(?: [+*-] \d+)+) = (\d+)", words if message["role"] == "assistant" else ""
            ):
                first, *rest = left.split(" ")
                total = int(first)
                for sign, number in zip(rest[::2], rest[1::2], strict=True):
                    total = SIGNS[sign](total, int(number))
                assert total == int(value), words
                num_checked += 1
            for found in re.findall(r"(\d+) / (\d+) = (\d+)(?: remainder (\d+))?", text(message)):
                number, divisor, quotient = map(int, found[:3])
                assert divmod(number, divisor) == (quotient, int(found[3] or 0))
                num_checked += 1
    assert num_checked > COUNT


def test_the_digits_that_the_steps_write_are_those_of_the_result() -> None:
    num_checked = 0
    for dialogue in drawn("arithmetic"):
        thoughts = str(dialogue.messages[-1].get("reasoning_content", ""))
        digits = re.findall(r"write (\d)", thoughts)
        if digits:
            result = int("".join(reversed(digits)))
            assert thoughts.endswith(f"= {result}")
            assert f"= {result}" in text(dialogue.messages[-1])
            num_checked += 1
    assert num_checked > 200


def test_thoughts_are_there_where_the_template_is_told_so() -> None:
    thinking = [dialogue for dialogue in drawn("arithmetic") if dialogue.template]
    assert 0.3 < len(thinking) / COUNT < 0.5
    assert all(dialogue.template == {"enable_thinking": True} for dialogue in thinking)
    assert all(dialogue.messages[-1]["reasoning_content"] for dialogue in thinking)
    others = [dialogue for dialogue in drawn("arithmetic") if not dialogue.template]
    assert not any("reasoning_content" in message for dialogue in others for message in dialogue.messages)


def test_numbers_are_compared_and_ordered_rightly() -> None:
    kinds = Counter()
    for dialogue in drawn("arithmetic"):
        for (question, answer), content in zip(pairs(dialogue), dialogue.contents, strict=True):
            numbers, kind = [int(number) for number in re.findall(r"\d+", question)], content[0]
            first = int(re.findall(r"\d+", answer)[0])
            kinds[kind] += 1
            if kind in ("max", "min"):
                assert first == {"max": max, "min": min}[str(kind)](numbers)
            elif kind == "sort":
                order = [int(number) for number in answer.split(", ")]
                assert order == sorted(numbers, reverse=bool(re.search("argest first|from large", question)))
            elif kind == "next":
                assert first - numbers[-1] == numbers[1] - numbers[0] == numbers[-1] - numbers[-2]
            elif kind == "is-larger":
                assert answer.startswith("Yes" if (numbers[0] > numbers[1]) == ("larger" in question) else "No")
                assert ("larger" in answer) == (numbers[0] > numbers[1])
            elif kind == "parity":
                assert ("even" in answer) == (numbers[0] % 2 == 0)
            elif kind in ("double", "half"):
                values = [int(number) for number in re.findall(r"\d+", answer)]
                assert values[1] == (values[0] * 2 if kind == "double" else values[0] / 2)
    assert min(kinds[kind] for kind in ("max", "min", "sort", "next", "is-larger", "parity", "double", "half")) > 10


def test_a_json_answer_is_json_and_all_of_it_stands_in_the_question() -> None:
    for dialogue in drawn("json"):
        for question, answer in pairs(dialogue):
            value = json.loads(answer)
            assert json.dumps(value, ensure_ascii=False) == answer
            for leaf in leaves(value):
                assert leaf is None or isinstance(leaf, bool) or str(leaf) in question or plural(str(leaf)) in question


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_a_json_answer_has_the_keys_and_types_of_the_schema() -> None:
    kinds = {"string": str, "number": int, "string or null": type(None)}
    num_checked = 0
    for dialogue in drawn("json"):
        for question, answer in pairs(dialogue):
            schema = re.search(r'\{("\w+": "(?:string|number|string or null)"(?:, )?)+\}', question)
            if schema:
                wanted, value = json.loads(schema[0]), json.loads(answer)
                assert list(wanted) == list(value)
                assert all(isinstance(value[key], kinds[kind]) for key, kind in wanted.items())
                num_checked += 1
    assert num_checked > 100


def test_objects_are_edited_and_repaired_as_asked() -> None:
    num_checked = 0
    for dialogue in drawn("json"):
        for question, answer in pairs(dialogue):
            given, value = re.search(r"\{.*\}", question), json.loads(answer)
            if found := re.match(r'Set "id" to (\d+) in', question):
                assert value == json.loads(given[0]) | {"id": int(found[1])}
            elif found := re.match(r'Remove the key "(\w+)"', question):
                assert value == {key: item for key, item in json.loads(given[0]).items() if key != found[1]}
            elif found := re.match(r'Rename the key "(\w+)" to "(\w+)"', question):
                assert list(value) == [found[2] if key == found[1] else key for key in json.loads(given[0])]
            elif question.startswith("Write the keys in lower case"):
                assert value == {key.lower(): item for key, item in json.loads(given[0]).items()}
            elif question.startswith(("Fix", "Correct", "Repair", "Make this valid")):
                with pytest.raises(json.JSONDecodeError):
                    json.loads(question.partition(": ")[2])
            else:
                continue
            num_checked += 1
    assert num_checked > 500


def test_every_call_keeps_to_a_schema_that_was_given() -> None:
    num_calls = 0
    for dialogue in drawn("tools"):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        assert len(schemas) == len(dialogue.tools) >= 1
        for message in dialogue.messages:
            for call in message.get("tool_calls", []):
                schema, arguments = schemas[call["function"]["name"]], json.loads(call["function"]["arguments"])
                assert list(arguments) == schema["required"] == list(schema["properties"])
                kinds = [JSON_TYPES[parameter["type"]] for parameter in schema["properties"].values()]
                assert all(isinstance(value, kind) for value, kind in zip(arguments.values(), kinds, strict=True))
                num_calls += 1
    assert num_calls > COUNT * 0.7


def test_an_answer_says_only_numbers_that_were_said_or_returned() -> None:
    for dialogue in drawn("tools"):
        if dialogue.messages[-2]["role"] != "tool":
            continue
        before = " ".join(text(message) for message in dialogue.messages[:-1])
        answer = text(dialogue.messages[-1])
        assert set(re.findall(r"\d+", answer)) <= set(re.findall(r"\d+", before))


def test_results_of_calculators_and_converters_are_right() -> None:
    num_checked = 0
    for dialogue in drawn("tools"):
        for message, returned in zip(dialogue.messages, dialogue.messages[1:], strict=False):
            for call in message.get("tool_calls", []):
                values = list(json.loads(call["function"]["arguments"]).values())
                result = json.loads(text(returned))
                if "result" in result:
                    left, sign, right = values[0].split()
                    assert result["result"] == SIGNS[sign](int(left), int(right))
                elif "unit" in result:
                    assert result == {"value": values[0] * FACTORS[values[1]], "unit": values[2]}
                else:
                    continue
                num_checked += 1
    assert num_checked > 300


def test_the_warmer_city_is_warmer() -> None:
    num_checked = 0
    for dialogue in drawn("tools"):
        answer = text(dialogue.messages[-1])
        if found := re.match(r"It is (warmer|colder) in \w+, with (-?\d+) degrees\. \w+ has (-?\d+)\.", answer):
            assert (int(found[2]) > int(found[3])) == (found[1] == "warmer")
            num_checked += 1
    assert num_checked > 50


def test_lists_are_sorted_counted_and_changed_rightly() -> None:
    kinds = Counter()
    for dialogue in plain_chats():
        for (question, answer), (kind, *content) in zip(pairs(dialogue), dialogue.contents, strict=True):
            kinds[kind] += 1
            items = answer.split(", ")
            if kind == "sort":
                order, *words = content
                assert sorted(items) == sorted(words)
                assert all(word in question for word in words)
                assert items == (
                    words[::-1] if order == "reverse" else sorted(words, key=len if order == "length" else str)
                )
            elif kind == "remove":
                assert items == [word for word in content[1:] if word != content[0]]
            elif kind == "add":
                assert items == [*content[1:], content[0]]
            elif kind == "spell":
                assert answer.replace("-", "") == content[0].lower()
            elif kind == "count":
                assert question.count(", ") + 1 == len(content)
                assert WORDS[len(content)] in answer
            elif kind == "letters":
                assert f"has {WORDS[len(content[0])]} letters" in answer
            elif kind == "times":
                assert answer.split() == [content[0]] * content[1]
    assert min(kinds[kind] for kind in ("sort", "remove", "add", "spell", "count", "letters", "times")) > 3


WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
]


def test_what_was_said_before_is_remembered() -> None:
    kinds = Counter()
    for dialogue in plain_chats():
        said = " ".join(text(message) for message in dialogue.messages[:-2])
        for (question, answer), (kind, *content) in zip(pairs(dialogue), dialogue.contents, strict=True):
            if kind == "name" and question.endswith("?") and len(content) == 1:
                assert answer == f"Your name is {content[0]}."
                assert str(content[0]) in said
            elif kind == "favourite" and question.endswith("?"):
                found = re.fullmatch(r"Your favourite (\w+) is (\w+)\.", answer)
                assert found
                assert f"favourite {found[1]} is {found[2]}" in said.lower() or f"{found[1]} is {found[2]}" in said
                assert found[1] in question
            elif kind == "person" and question.endswith("?"):
                assert any(str(part) in answer for part in content)
            else:
                continue
            kinds[kind] += 1
    assert min(kinds.values()) > 20
    assert set(kinds) == {"name", "favourite", "person"}


def test_a_style_that_the_system_message_asks_for_is_kept() -> None:
    kinds = Counter()
    for dialogue in drawn("chat"):
        system = text(dialogue.messages[0]) if dialogue.messages[0]["role"] == "system" else ""
        answers = [text(message) for message in dialogue.messages if message["role"] == "assistant"]
        if "capital letters" in system or "upper case" in system:
            assert all(answer == answer.upper() for answer in answers)
            kinds["upper"] += 1
        elif found := re.match(r'(End|Begin) every answer with "(.*)"', system):
            assert all((answer.endswith if found[1] == "End" else answer.startswith)(found[2]) for answer in answers)
            kinds[found[1]] += 1
        elif found := re.match(r"(?:You are called|Your name is|You are an assistant named) (\w+)", system):
            assert any(found[1] in answer for answer in answers)
            kinds["named"] += 1
    assert min(kinds.values()) > 20
    assert len(kinds) == 4


def test_built_in_meanings_are_plain_and_of_different_words() -> None:
    assert len(dict(BUILT_IN)) == len(BUILT_IN) >= 150
    assert all(re.fullmatch(r"[a-z]+", word) and 5 < len(gloss) < 80 for word, gloss in BUILT_IN)


def test_meanings_are_read_from_lists_and_from_gathered_text(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("tern\ta small sea bird\nTern\tno word\nx\tshort\ntern\tanother meaning of it\n")
    assert read_glosses(tmp_path / "list") == (("tern", "a small sea bird"),)
    lines = (
        'tern (noun): a small sea bird. Synonyms: x.\nThe verb "amble" means: to walk slowly and calmly. One can.\nno'
    )
    (tmp_path / "glosses.jsonl").write_text(json.dumps({"text": lines}) + "\n")
    found = read_glosses(tmp_path / "glosses.jsonl")
    assert found == (("tern", "a small sea bird"), ("amble", "to walk slowly and calmly"))
    asked = [text(dialogue.messages[-2]) for dialogue in generate("chat", 300, 1, pairs=found)]
    assert any("tern" in question for question in asked)
    (tmp_path / "empty").write_text("nothing")
    with pytest.raises(ValueError, match="must hold lines"):
        read_glosses(tmp_path / "empty")
