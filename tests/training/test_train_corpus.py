"""Text files to token ids: domains, documents, the cache, and what is refused."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from oracles.engine_rig import TINY
from tokenizers import Tokenizer
from training.train_rig import write_text_folder, write_texts

from gdn_jax.training.corpus import Text
from gdn_jax.training.errors import TrainingError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text"))


def read(*folders: Path, domains: tuple[str, ...] = ("prose", "arithmetic"), cache: str = ""):
    return Text(TINY).read([str(folder) for folder in folders], domains, cache=cache, quiet=True)


def test_documents_are_those_of_the_files_each_closed(folder):
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    corpus = read(folder)
    part = corpus.train["arithmetic"]
    assert part.tokens.dtype == np.uint16
    for number in (0, 7, 39):
        ids = part.tokens[part.starts[number] : part.starts[number + 1]]
        assert tokenizer.decode(ids[:-1].tolist()) == f"{number} + {number} = {2 * number}"
        assert ids[-1] == corpus.end_token == tokenizer.token_to_id("<|endoftext|>")
    assert len(corpus.train["prose"].starts) == 81
    assert len(corpus.held_out["prose"].starts) == 17


def test_special_tokens_in_the_text_are_read_as_such(tmp_path):
    for part in ("train", "held_out"):
        write_texts(tmp_path / part / "chat.jsonl.xz", ["<|im_start|>user"])
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert read(tmp_path, domains=("chat",)).train["chat"].tokens[0] == tokenizer.token_to_id("<|im_start|>")


def test_a_domain_may_stand_in_several_folders(folder, tmp_path):
    for part in ("train", "held_out"):
        write_texts(tmp_path / part / "prose.jsonl.xz", ["once more"])
    assert len(read(folder, tmp_path, domains=("prose",)).train["prose"].starts) == 82


def test_the_cache_gives_the_same_and_follows_the_files(folder, tmp_path):
    cache = tmp_path / "cache"
    first, second = (read(folder, cache=str(cache)) for _ in range(2))
    assert len(list(cache.iterdir())) == 4
    for name, part in first.train.items():
        assert np.array_equal(part.tokens, second.train[name].tokens)
        assert np.array_equal(part.starts, second.train[name].starts)
    changed = write_text_folder(tmp_path / "changed")
    write_texts(changed / "train" / "arithmetic.jsonl.xz", ["1 + 1 = 3"])
    assert len(read(changed, cache=str(cache)).train["arithmetic"].starts) == 2


@pytest.mark.parametrize("content", [b"", b"cut short"])
def test_damaged_kept_text_is_made_again(folder, tmp_path, content):
    first = read(folder, cache=str(tmp_path))
    for path in tmp_path.iterdir():
        path.write_bytes(content)
    again = read(folder, cache=str(tmp_path))
    assert np.array_equal(again.train["prose"].tokens, first.train["prose"].tokens)
    assert all(path.read_bytes() != content for path in tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_refused_by_name(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"data\.cache must be a folder with room"):
        read(folder, cache=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "plain"}\n', "xz"),
        (lzma.compress(b'{"text": "a"}\n{"txt": "b"}\n'), "line 2"),
        (lzma.compress(b'{"text": 3}\n'), "line 1"),
        (lzma.compress(b"no json\n"), "line 1"),
        (lzma.compress(b'{"text": "half a pair: \\ud800"}\n'), "line 1"),
        (lzma.compress(b"[" * 100_000), "line 1"),
        (lzma.compress(b'{"text": "cut short"}\n')[:-8], "xz"),
        (lzma.compress(b""), "hold documents"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, reason):
    write_texts(tmp_path / "held_out" / "docs.jsonl.xz", ["fine"])
    write_texts(tmp_path / "train" / "docs.jsonl.xz", ["fine"])
    (tmp_path / "train" / "docs.jsonl.xz").write_bytes(content)
    with pytest.raises(TrainingError, match=r"docs\.jsonl\.xz") as refused:
        read(tmp_path, domains=("docs",))
    assert reason in str(refused.value)


def test_missing_text_and_tokenizers_are_refused_by_name(folder, tmp_path):
    with pytest.raises(TrainingError, match="domain code must have text in train"):
        read(folder, domains=("code",))
    with pytest.raises(TrainingError, match="must hold train/"):
        read(tmp_path)
    with pytest.raises(TrainingError, match=r"tokenizer\.json"):
        Text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TrainingError, match="the tokenizer must be readable"):
        Text(tmp_path)
