"""Command line: python -m scripts.gather_text --out FOLDER."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from scripts.gather_text.dedupe import SeenLines
from scripts.gather_text.download import DownloadError, fetch
from scripts.gather_text.gather import Document, clean_texts, documents
from scripts.gather_text.sources import SOURCES, Source, SourceList, load_sources
from scripts.gather_text.write import write_account, write_documents

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Gather everything; return the exit status."""
    options = _parse(arguments)
    started = time.monotonic()
    listed = load_sources(options.sources)
    # Held-out packages first, so that what is like them in others is left out of training.
    wanted = sorted(listed.sources, key=lambda source: not source.held_out)
    try:
        archives = _download(wanted, options.cache, skip_missing=options.skip_missing)
    except DownloadError as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    found, dropped = _gather(archives, listed, options.jobs)
    sys.stderr.write("compressing, which takes minutes\n")
    sizes = write_documents(found, options.out)
    write_account(list(archives), found, sizes, options.out)
    _report(found, sizes, dropped, time.monotonic() - started)
    return 0


def _download(sources: Sequence[Source], cache: Path, *, skip_missing: bool) -> dict[Source, Path]:
    archives = {}
    for source in tqdm(sources, desc="archives", unit="package"):
        try:
            archives[source] = fetch(source, cache)
        except DownloadError as error:
            if not skip_missing:
                raise
            tqdm.write(f"left out: {error}", file=sys.stderr)
    return archives


def _gather(archives: dict[Source, Path], listed: SourceList, jobs: int) -> tuple[list[Document], Counter[str]]:
    found, dropped, seen = [], Counter[str](), SeenLines()
    # Cleaning is what takes time, and needs nothing of other archives; what was seen before depends on the order.
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver")) as pool:
        results = pool.map(clean_texts, archives, repeat(listed), archives.values())
        for source, result in tqdm(zip(archives, results, strict=True), "text", len(archives), unit="package"):
            found.extend(documents(source, result, seen))
            dropped += result.dropped
    return found, dropped


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.gather_text", description="Gather text to train on.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train/, held_out/ and sources.json")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "text", help="folder that keeps the archives")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the list of packages")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="archives that are read side by side")
    parser.add_argument("--skip-missing", action="store_true", help="go on without packages that cannot be downloaded")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # now, not after an hour of work
    except OSError as error:
        parser.error(f"--out must be a folder: {error}")
    return options


def _report(found: Sequence[Document], sizes: dict[str, int], dropped: Counter[str], seconds: float) -> None:
    sys.stdout.write(f"{'':20}{'documents':>10}{'MB raw':>10}{'MB xz':>10}\n")
    for name, size in sizes.items():
        split, domain = name.split("/")
        texts = [doc.text for doc in found if doc.domain == domain and doc.held_out == (split == "held_out")]
        raw = sum(map(len, texts))
        sys.stdout.write(f"{name:20}{len(texts):10}{raw / 1e6:10.1f}{size / 1e6:10.2f}\n")
    for reason, count in sorted(dropped.items()):
        sys.stdout.write(f"{count:8} files dropped for {reason}\n")
    sys.stdout.write(f"{seconds:.0f} seconds\n")


if __name__ == "__main__":
    sys.exit(main())
