"""Tokenizer: files and their faults, ids and text both ways, end tokens, generation defaults."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.byte_tokenizer import (
    ADDED,
    END_OF_TEXT,
    IM_END,
    IM_START,
    NUM_TOKENS,
    SPECIAL,
    byte_ids,
    write_byte_tokenizer,
)
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, processors

from gdn_jax.serving.core.errors import InvalidPromptError, StartupError
from gdn_jax.serving.text.tokenizer import GenerationDefaults, Tokenizer

GOLDEN_FOLDERS = ["tiny-next-moe", "tiny-next-dense", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model")), 512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path)


def write_generation_config(folder: Path, **values: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_a_folder_without_tokenizer_json_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path, 512)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", '{"model": 1}', "\x00", "[]", "[" * 100_000], ids=lambda content: repr(content[:12])
)
def test_a_damaged_tokenizer_json_is_refused_by_name(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json (cannot|must) .* Fetch the file again"):
        Tokenizer(folder, 512)


def test_a_tokenizer_that_is_not_byte_level_is_refused(folder: Path) -> None:
    LibraryTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(StartupError, match="byte-level"):
        Tokenizer(folder, 512)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused_with_the_numbers(folder: Path) -> None:
    assert Tokenizer(folder, NUM_TOKENS).num_tokens == NUM_TOKENS
    with pytest.raises(StartupError, match=f"vocabulary of {NUM_TOKENS - 1}; its largest id is {NUM_TOKENS - 1}"):
        Tokenizer(folder, NUM_TOKENS - 1)


def test_unknown_keys_of_tokenizer_config_are_ignored(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path, tokenizer_class="Qwen9Tokenizer", add_bos_token=True, extra={"a": [1]})
    assert Tokenizer(folder, 512).encode("hello") == Tokenizer(folder, 512).encode("hello")
    assert len(Tokenizer(folder, 512).encode("hello")) == 1


def test_nothing_is_put_around_a_text_and_nothing_cut_off(folder: Path) -> None:
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END_OF_TEXT)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=20)
    library.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder, 512).encode("abcdef") == byte_ids("abcdef")


def test_added_tokens_in_a_text_become_their_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\n<think>x<|im_end|>")
    assert ids == [IM_START, *byte_ids("user\n"), NUM_TOKENS - len(ADDED) + 2, *byte_ids("x"), IM_END]


def test_only_special_tokens_are_skipped_so_think_tags_stay(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>x</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|><think>x</think><|im_end|>"
    assert [tokenizer.is_special(token_id) for token_id in ids] == [True, False, False, False, True]
    assert set(tokenizer.special_tokens) == set(SPECIAL)


def test_ids_of_the_padded_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.num_tokens == NUM_TOKENS < tokenizer.vocab_size == 512
    assert tokenizer.decode([NUM_TOKENS, *byte_ids("a"), 511, 512, 2**40, -1, *byte_ids("b")]) == "ab"
    assert [tokenizer.token_bytes(token_id) for token_id in (NUM_TOKENS, 511, 2**40, -1)] == [b""] * 4


def test_added_tokens_that_the_library_would_renumber_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<|im_start|>"]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(StartupError, match=f"'<.im_end.>' is id {IM_END} in the file and would become {IM_START}"):
        Tokenizer(folder, 512)


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "x" * 50 + "\udc00\ud83d"])
def test_lone_surrogates_are_refused_with_their_place(tokenizer: Tokenizer, text: str) -> None:
    place = next(index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    with pytest.raises(InvalidPromptError, match=f"character {place} is the lone surrogate U\\+D"):
        tokenizer.encode(text)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_other_text_encodes_to_real_ids(tokenizer: Tokenizer, text: str) -> None:
    assert all(0 <= token_id < tokenizer.num_tokens for token_id in tokenizer.encode(text))


# Without characters that Python's own tables do not know, whose normal form is then unknown too, and without the added
# token "é!", whose é the byte alphabet reads as the byte E9.
@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"])).filter(lambda text: "é!" not in text))
def test_text_comes_back_normalized(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == normalize("NFC", text)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, NUM_TOKENS + 5)), skip=st.booleans())
def test_the_bytes_of_the_tokens_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> None:
    kept = [token_id for token_id in ids if not (skip and tokenizer.is_special(token_id))]
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in kept)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == joined.decode(errors="replace")


def test_threads_may_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"hello {index} <think> \u4f60" * 20 for index in range(40)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == texts


@pytest.mark.parametrize(("named", "ends"), [([IM_END, END_OF_TEXT, IM_END], (IM_END, END_OF_TEXT)), (7, (7, IM_END))])
def test_end_tokens_of_generation_config_come_first_and_once(
    folder: Path, named: int | list[int], ends: tuple[int, ...]
) -> None:
    write_generation_config(folder, eos_token_id=named)
    assert Tokenizer(folder, 512).end_token_ids == ends


def test_without_generation_config_the_config_and_the_tokenizers_own_end_the_text(folder: Path) -> None:
    assert Tokenizer(folder, 512, config_eos=(END_OF_TEXT, 9)).end_token_ids == (END_OF_TEXT, 9, IM_END)


def test_a_special_end_token_of_config_json_ends_the_text_too(folder: Path) -> None:
    write_generation_config(folder, eos_token_id=[IM_END])
    assert Tokenizer(folder, 512, config_eos=(END_OF_TEXT,)).end_token_ids == (IM_END, END_OF_TEXT)


def test_an_ordinary_token_that_config_json_names_does_not_end_a_text_that_generation_config_governs(
    folder: Path,
) -> None:
    write_generation_config(folder, eos_token_id=[IM_END])
    assert Tokenizer(folder, 512, config_eos=(2,)).end_token_ids == (IM_END,)


def test_an_end_token_outside_the_vocabulary_is_refused(folder: Path) -> None:
    write_generation_config(folder, eos_token_id=[IM_END, 512])
    with pytest.raises(StartupError, match=r"vocabulary of 512; got \[512\]"):
        Tokenizer(folder, 512)


@pytest.mark.parametrize("value", ["x", 1.5, True, -1, [[1]], {"a": 1}])
def test_an_end_token_that_is_no_id_is_refused(folder: Path, value: object) -> None:
    write_generation_config(folder, eos_token_id=value)
    with pytest.raises(StartupError, match=r"eos_token_id in generation_config\.json"):
        Tokenizer(folder, 512)


def test_a_named_end_token_may_be_an_object_or_missing_from_the_vocabulary(tmp_path: Path) -> None:
    as_object = write_byte_tokenizer(tmp_path / "a", eos_token={"content": "<|im_end|>", "lstrip": False})
    unknown = write_byte_tokenizer(tmp_path / "b", eos_token="<eos>")
    none = write_byte_tokenizer(tmp_path / "c", eos_token=None)
    ends = [Tokenizer(folder, 512, config_eos=(3,)).end_token_ids for folder in (as_object, unknown, none)]
    assert ends == [(3, IM_END), (3,), (3,)]


def test_a_folder_without_generation_config_has_neutral_defaults(folder: Path) -> None:
    assert Tokenizer(folder, 512).generation_defaults == GenerationDefaults(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, eos_token_ids=()
    )


def test_generation_defaults_are_read_and_unknown_keys_ignored(folder: Path) -> None:
    write_generation_config(
        folder, do_sample=True, temperature=1, top_p=0.8, top_k=20, min_p=None, presence_penalty=1.5, max_length=20
    )
    expected = GenerationDefaults(temperature=1.0, top_p=0.8, top_k=20, presence_penalty=1.5)
    assert Tokenizer(folder, 512).generation_defaults == expected


def test_what_the_file_asks_for_and_nothing_applies_is_named_unless_it_asks_for_nothing(folder: Path) -> None:
    write_generation_config(
        folder, repetition_penalty=1.05, no_repeat_ngram_size=3, num_beams=4, bad_words_ids=None, typical_p=1.0
    )
    found = GenerationDefaults.from_folder(folder)
    assert found.not_applied == ("no_repeat_ngram_size=3", "num_beams=4")
    assert found.repetition_penalty == 1.05


def test_a_tokenizer_from_elsewhere_brings_neither_end_tokens_nor_sampling(folder: Path, tmp_path: Path) -> None:
    write_generation_config(folder, temperature=0.1, eos_token_id=[5])
    model = tmp_path / "model"
    model.mkdir()
    write_generation_config(model, temperature=0.6, eos_token_id=END_OF_TEXT)
    mixed = Tokenizer(folder, 512, config_eos=[IM_START], model_folder=model)
    assert mixed.end_token_ids == (END_OF_TEXT, IM_START)  # and not the <|im_end|> of the other tokenizer_config.json
    assert mixed.generation_defaults.temperature == 0.6
    bare = tmp_path / "bare"
    bare.mkdir()
    assert Tokenizer(folder, 512, config_eos=[7], model_folder=bare).end_token_ids == (7,)


def test_do_sample_false_means_greedy_and_a_negative_top_k_off(folder: Path) -> None:
    write_generation_config(folder, do_sample=False, temperature=0.7, top_k=-1)
    assert GenerationDefaults.from_folder(folder) == GenerationDefaults(temperature=0.0, top_k=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", [1]),
    ],
)
def test_a_default_out_of_range_is_refused_by_name(folder: Path, name: str, value: object) -> None:
    write_generation_config(folder, **{name: value})
    with pytest.raises(StartupError, match=f"{name} in generation_config.json"):
        Tokenizer(folder, 512)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000], ids=lambda content: repr(content[:6]))
def test_a_damaged_json_file_is_refused_by_name(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(StartupError, match=name):
        Tokenizer(folder, 512)


@pytest.mark.parametrize("name", GOLDEN_FOLDERS)
def test_golden_texts_encode_and_decode_exactly(golden_folder: Path, name: str) -> None:
    config = json.loads((golden_folder / name / "config.json").read_text())
    sizes = config.get("text_config", config)
    tokenizer = Tokenizer(golden_folder / name, sizes["vocab_size"], config_eos=(sizes["eos_token_id"],))
    cases = json.loads((golden_folder / name / "tokenizer_golden.json").read_text())["text"]
    assert cases
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["decoded_skip_special"]
    generation = json.loads((golden_folder / name / "generation_config.json").read_text())
    assert tokenizer.end_token_ids == tuple(generation["eos_token_id"])
    assert tokenizer.generation_defaults.temperature == generation["temperature"]
