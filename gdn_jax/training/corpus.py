"""The text of a run as token ids: one flat array per domain, each document closed with `<|endoftext|>`.

A folder holds `train/DOMAIN[-N].jsonl.xz` and `held_out/DOMAIN[-N].jsonl.xz`, one JSON object with `text` per line; a
domain may have files in several folders. Files are decompressed in threads, and the tokenizer spreads each batch of
documents over all cores. What was tokenized once can be kept in a cache folder.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Int, Integer
from tokenizers import Tokenizer
from tqdm import tqdm

from gdn_jax.training.errors import TrainingError
from gdn_jax.training.text_files import domain_files, read_documents

_LOG = logging.getLogger(__name__)
END_OF_TEXT = "<|endoftext|>"
_DOCUMENTS = 4096  # per call of the tokenizer: enough for every core, and little memory


@dataclass(frozen=True, kw_only=True)
class DomainTokens:
    """The documents of one domain, one after the other.

    Attributes:
        tokens: uint16 where the vocabulary allows it, else int32.
        starts: first token of each document, and the end of the last; int64.
    """

    tokens: Integer[np.ndarray, "tokens"]
    starts: Int[np.ndarray, "borders"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All domains of a run, and the id that pads and closes documents."""

    train: Mapping[str, DomainTokens]
    held_out: Mapping[str, DomainTokens]
    end_token: int


class Text:
    """The tokenizer of a run and the files that it reads."""

    def __init__(self, tokenizer_folder: str | Path) -> None:
        """Load the tokenizer.

        Raises:
            TrainingError: no tokenizer.json, a damaged one, or one without `<|endoftext|>`.
        """
        path = Path(tokenizer_folder) / "tokenizer.json"
        if not path.is_file():
            raise TrainingError(f"tokenizer must be a folder with tokenizer.json; got {tokenizer_folder}; correct it")
        self._bytes = path.read_bytes()
        try:
            self._tokenizer = Tokenizer.from_buffer(self._bytes)
        except ValueError as error:
            raise TrainingError(f"the tokenizer must be readable; {path}: {error}; copy it again") from error
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise TrainingError(f"the tokenizer must have {END_OF_TEXT}, which closes documents; {path} has none")
        self.end_token = end
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def read(self, folders: Iterable[str], domains: Iterable[str], *, cache: str = "", quiet: bool = False) -> Corpus:
        """Read and tokenize both parts of every domain.

        Args:
            folders: see the module.
            domains: those that are wanted; each must have text in both parts.
            cache: folder for tokenized text; empty for none.
            quiet: no progress bar.

        Raises:
            TrainingError: a folder or domain has no files, or a file is damaged.
        """
        folders, domains = list(folders), list(domains)
        parts = {(part, name): _files(folders, part, name) for part in ("train", "held_out") for name in domains}
        for (part, name), files in parts.items():
            if not files:
                raise TrainingError(
                    f"domain {name} must have text in {part}; found no {part}/{name}[-N].jsonl.xz in "
                    f"{', '.join(folders)}; add it, or take {name} out of data.weights"
                )
        num_bytes = sum(path.stat().st_size for files in parts.values() for path in files)
        bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenizing", disable=quiet)
        # Two pools, since whoever reads a domain waits for its files.
        with bar, ThreadPoolExecutor(len(parts)) as readers, ThreadPoolExecutor(os.cpu_count()) as pool:
            tokens = readers.map(lambda files: self._read_cached(files, cache, bar, pool), parts.values())
            read = dict(zip(parts, tokens, strict=True))
        return Corpus(
            train={name: read["train", name] for name in domains},
            held_out={name: read["held_out", name] for name in domains},
            end_token=self.end_token,
        )

    def _read_cached(self, files: list[Path], cache: str, bar: tqdm, pool: ThreadPoolExecutor) -> DomainTokens:
        if not cache:
            return self._read_files(files, bar, pool)
        key = sha256(self._bytes)
        for path in files:
            key.update(sha256(path.read_bytes()).digest())
        kept = Path(cache) / f"{key.hexdigest()[:32]}.npz"
        if kept.is_file():
            try:
                with np.load(kept) as arrays:
                    tokens = DomainTokens(tokens=arrays["tokens"], starts=arrays["starts"])
            except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
                _LOG.warning("kept text is damaged and made again: %s: %s", kept, error)
            else:
                bar.update(sum(path.stat().st_size for path in files))
                return tokens
        tokens = self._read_files(files, bar, pool)
        _keep(kept, tokens)
        return tokens

    def _read_files(self, files: list[Path], bar: tqdm, pool: ThreadPoolExecutor) -> DomainTokens:
        def read(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
            parts = [self._encode(texts) for texts in _batches(document["text"] for document in read_documents(path))]
            bar.update(path.stat().st_size)
            return parts

        parts = [part for parts in pool.map(read, files) for part in parts]
        if not parts:
            raise TrainingError(f"text files must hold documents; {files[0]} and its siblings hold none; correct them")
        lengths = np.concatenate([lengths for _, lengths in parts])
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return DomainTokens(tokens=np.concatenate([ids for ids, _ in parts]), starts=starts)

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of documents, each with its end, and their lengths."""
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32
        end = np.array([self.end_token], dtype)
        pieces: list[np.ndarray] = []
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            pieces += [np.array(encoding.ids, dtype), end]
        lengths = np.array([len(piece) for piece in pieces[::2]], np.int64) + 1
        return np.concatenate(pieces), lengths


def _keep(path: Path, tokens: DomainTokens) -> None:
    """Write tokenized text under another name, and rename it when it is whole."""
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(unfinished, tokens=tokens.tokens, starts=tokens.starts)
        unfinished.replace(path)
    except OSError as error:
        raise TrainingError(
            f"data.cache must be a folder with room to write in; {path.parent}: {error}; correct it, or leave it empty"
        ) from error


def _files(folders: list[str], part: str, domain: str) -> list[Path]:
    for folder in folders:
        if not (Path(folder) / part).is_dir():
            raise TrainingError(f"data.folders must hold {part}/; {folder} does not; correct the path")
    return domain_files(folders, part, domain)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(texts, _DOCUMENTS)):
        yield batch
