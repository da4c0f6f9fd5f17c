"""Documents to compressed files, and the account of what is in them."""

import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.gather_text.gather import Document
from scripts.gather_text.sources import DOMAINS, Source

SEED = 20250
MAX_SHARD_BYTES = 12 * 2**20
# The compressor may hold this much back until it is told to finish.
_MARGIN_BYTES = 2**18


def write_documents(documents: Sequence[Document], out: Path) -> dict[str, int]:
    """Write `train/` and `held_out/` under `out`, one or more files per domain, in a shuffled order, always the same.

    Returns:
        The bytes of all files per "train/code" and so on.
    """
    groups = [(split, domain) for split in ("train", "held_out") for domain in DOMAINS]
    jobs = []
    for split, domain in groups:
        chosen = [doc for doc in documents if doc.domain == domain and doc.held_out == (split == "held_out")]
        random.Random(SEED).shuffle(chosen)
        jobs.append((chosen, out / split, domain))
    with ThreadPoolExecutor(max_workers=2) as pool:  # the compressor runs outside Python's lock
        sizes = pool.map(lambda job: write_shards(*job), jobs)
    return {f"{split}/{domain}": size for (split, domain), size in zip(groups, sizes, strict=True)}


def write_shards(
    documents: Iterable[Document],
    folder: Path,
    domain: str,
    max_bytes: int = MAX_SHARD_BYTES,
    margin: int = _MARGIN_BYTES,
) -> int:
    """Write `domain`.jsonl.xz, or `domain`-0.jsonl.xz and so on if one file would pass `max_bytes`; return their bytes.

    Files of an earlier run are replaced. Nothing is written if there are no documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(f"{domain}.jsonl.xz"), *folder.glob(f"{domain}-*.jsonl.xz")]:
        old.unlink()
    shards: list[bytearray] = []
    compressor = None
    for document in documents:
        if compressor is None:
            compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
            shards.append(bytearray())
        line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n"
        shards[-1] += compressor.compress(line.encode())
        if len(shards[-1]) > max_bytes - margin:
            shards[-1] += compressor.flush()
            compressor = None
    if compressor is not None:
        shards[-1] += compressor.flush()
    for number, shard in enumerate(shards):
        suffix = f"-{number}" if len(shards) > 1 else ""
        (folder / f"{domain}{suffix}.jsonl.xz").write_bytes(shard)
    return sum(map(len, shards))


def write_account(sources: Sequence[Source], documents: Sequence[Document], sizes: dict[str, int], out: Path) -> None:
    """Write sources.json: what came from where, under which licence, and the sums per domain.

    Args:
        sources: Those that were read.
        documents: All that was written.
        sizes: Compressed bytes, from `write_documents`.
        out: The folder.
    """
    rows = [row for source in _merged(sources) for row in _rows(source, documents_of(source.label, documents))]
    sums = []
    for name, compressed in sizes.items():
        split, domain = name.split("/")
        chosen = [doc for doc in documents if doc.domain == domain and doc.held_out == (split == "held_out")]
        sums.append({"split": split, "domain": domain, **_counts(chosen), "compressed_bytes": compressed})
    account = {"sums": sums, "sources": rows}
    (out / "sources.json").write_text(json.dumps(account, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def documents_of(label: str, documents: Sequence[Document]) -> list[Document]:
    """Return the documents of one source."""
    return [doc for doc in documents if doc.source == label]


def _merged(sources: Sequence[Source]) -> list[Source]:
    """Return one entry per package: some stand in the list twice, with different paths."""
    return sorted({source.label: source for source in sources}.values(), key=lambda source: source.label)


def _rows(source: Source, documents: Sequence[Document]) -> list[dict[str, object]]:
    facts = {"registry": source.registry, "name": source.name, "version": source.version, "licence": source.licence}
    facts |= {"sha256": source.sha256} | ({"notice": source.notice} if source.notice else {})
    groups = Counter((doc.domain, doc.held_out) for doc in documents)
    return [
        {**facts, "domain": domain, "split": "held_out" if held_out else "train"}
        | _counts([doc for doc in documents if (doc.domain, doc.held_out) == (domain, held_out)])
        for domain, held_out in sorted(groups)
    ]


def _counts(documents: Sequence[Document]) -> dict[str, int]:
    return {"documents": len(documents), "characters": sum(len(doc.text) for doc in documents)}
