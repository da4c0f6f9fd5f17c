"""The scripts that write dialogues and train the tokenizer."""

import json
import lzma
from pathlib import Path

import pytest

from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer
from gdn_jax.training.dialogues import DOMAINS
from scripts import generate_dialogues, train_tokenizer

COUNT = 12
PARTS = [(part, domain) for part in ("train", "held_out") for domain in DOMAINS]


def lines(path: Path) -> list[dict[str, object]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dialogues")
    assert generate_dialogues.main(["--out", str(out), "--count", str(COUNT), "--quiet"]) == 0
    return out


@pytest.mark.parametrize(("part", "domain"), PARTS)
def test_each_line_is_a_whole_dialogue(folder: Path, part: str, domain: str) -> None:
    found = lines(folder / part / f"{domain}.jsonl.xz")
    assert len(found) == COUNT
    for line in found:
        text = str(line["text"])
        assert text.startswith(("<|im_start|>user\n", "<|im_start|>system\n"))
        assert text.endswith("<|im_end|>\n")
        assert (line["source"], line["domain"]) == ("generated", domain)
        assert ("messages" in line) == (part == "held_out")


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_held_out_line_holds_what_its_text_was_rendered_from(folder: Path, domain: str) -> None:
    template = ChatTemplate.from_folder(generate_dialogues.PICO)
    for line in lines(folder / "held_out" / f"{domain}.jsonl.xz"):
        messages, tools, variables = line["messages"], line["tools"], line["template"]
        assert template.render(messages, tools, add_generation_prompt=False) == line["text"]
        assert isinstance(messages, list)
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        prompt = template.render(messages[: last + 1], tools, variables=variables)
        assert str(line["text"]).startswith(prompt)


def test_the_same_arguments_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    generate_dialogues.main(["--out", str(tmp_path), "--count", str(COUNT), "--quiet"])
    for part, domain in PARTS:
        name = f"{part}/{domain}.jsonl.xz"
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_training_text_has_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_dialogues, "HELD_OUT", 2)
    generate_dialogues.main(["--out", str(tmp_path), "--megabytes", "0.1", "--quiet"])
    sizes = {
        domain: sum(len(str(line["text"]).encode()) for line in lines(tmp_path / "train" / f"{domain}.jsonl.xz"))
        for domain in DOMAINS
    }
    for domain, share in generate_dialogues.SHARES.items():
        assert share * 100_000 <= sizes[domain] < share * 100_000 + 5000


def test_words_of_a_list_are_asked_as_often_as_everyday_ones(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrst"
    (tmp_path / "words").write_text("".join(f"zz{a}{b}\ta thing of kind {a}\n" for a in letters for b in letters))
    pairs = generate_dialogues._pairs([tmp_path / "words"])
    others = sum(word.startswith("zz") for word, _ in pairs)
    assert others == 400
    assert 0.5 < others / (len(pairs) - others) < 2


def test_a_tokenizer_of_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text must be enough for 4096 ids; it was for 2"):
        train_tokenizer.train(["a b c"])


def test_the_tokenizer_is_trained_on_every_domain_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").mkdir()
    for domain in ("code", "prose"):
        with lzma.open(tmp_path / "train" / f"{domain}-0.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": f"{domain} " * 20}) + "\n" for _ in range(100))
    monkeypatch.setattr(train_tokenizer, "WEIGHTS", {"code": 0.75, "prose": 0.25, "docs": 0.1})
    texts = train_tokenizer.sample([tmp_path], 4000)
    sizes = {domain: sum(len(text) for text in texts if text.startswith(domain)) for domain in ("code", "prose")}
    assert 3000 <= sizes["code"] < 3200
    assert 1000 <= sizes["prose"] < 1200


def test_tags_in_the_text_are_no_merges_and_the_files_load(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tokenizer, "VOCABULARY", 400)
    assert train_tokenizer.main(["--text", str(folder), "--out", str(tmp_path), "--quiet"]) == 0
    tokenizer = Tokenizer(tmp_path, 400)
    assert len(tokenizer.encode("<|im_start|><think></tool_response>")) == 3
    assert not any(b"im_start" in tokenizer.token_bytes(token_id) for token_id in range(391))
    assert tokenizer.end_token_ids == (393, 391)


@pytest.mark.parametrize("amount", [("--count", "-1"), ("--megabytes", "0"), ("--megabytes", "nan")])
def test_an_amount_that_has_no_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture, amount) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate_dialogues.main(["--out", str(tmp_path), *amount])
    assert "--megabytes a number above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
