"""Command line: python -m scripts.gather_text --out FOLDER."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from scripts.gather_text.download import DownloadError, fetch
from scripts.gather_text.gather import Document, Gatherer
from scripts.gather_text.sources import load_sources
from scripts.gather_text.write import write_account, write_documents

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "configs" / "train" / "sources.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Gather everything; return the exit status."""
    options = _parse(arguments)
    started = time.monotonic()
    listed = load_sources(options.sources)
    gatherer, documents, used = Gatherer(listed), [], []
    # Held-out packages first: see Gatherer.
    for source in tqdm(sorted(listed.sources, key=lambda source: not source.held_out), unit="package"):
        try:
            archive = fetch(source, options.cache)
        except DownloadError as error:
            if not options.skip_missing:
                sys.stderr.write(f"\n{error}\n")
                return 1
            tqdm.write(f"left out: {error}", file=sys.stderr)
            continue
        documents.extend(gatherer.documents(source, archive))
        used.append(source)
    sys.stderr.write("compressing, which takes minutes\n")
    sizes = write_documents(documents, options.out)
    write_account(used, documents, sizes, options.out)
    _report(documents, sizes, gatherer, time.monotonic() - started)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.gather_text", description="Gather text to train on.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train/, held_out/ and sources.json")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "text", help="folder that keeps the archives")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the list of packages")
    parser.add_argument("--skip-missing", action="store_true", help="go on without packages that cannot be downloaded")
    return parser.parse_args(arguments)


def _report(documents: Sequence[Document], sizes: dict[str, int], gatherer: Gatherer, seconds: float) -> None:
    sys.stdout.write(f"{'':20}{'documents':>10}{'MB raw':>10}{'MB xz':>10}\n")
    for name, size in sizes.items():
        split, domain = name.split("/")
        texts = [doc.text for doc in documents if doc.domain == domain and doc.held_out == (split == "held_out")]
        raw = sum(map(len, texts))
        sys.stdout.write(f"{name:20}{len(texts):10}{raw / 1e6:10.1f}{size / 1e6:10.2f}\n")
    for reason, count in sorted(gatherer.dropped.items()):
        sys.stdout.write(f"{count:8} files dropped for {reason}\n")
    sys.stdout.write(f"{seconds:.0f} seconds\n")


if __name__ == "__main__":
    sys.exit(main())
