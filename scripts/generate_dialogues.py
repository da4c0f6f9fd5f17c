"""Write dialogues to train and to test a small model on, as its chat template renders them.

    python scripts/generate_dialogues.py --out FOLDER [--seed 1] [--count N | --megabytes N] [--glosses FILE ...]

FOLDER/train/DOMAIN.jsonl.xz holds one JSON object per line: `text`, a whole dialogue, `source` and `domain`. The lines
of FOLDER/held_out/DOMAIN.jsonl.xz also hold `messages`, `tools` and `template`, the variables of the chat template, so
that the prompt up to the last user message can be asked. The same arguments write the same bytes.
"""

import argparse
import json
import lzma
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.shipped import model_folder
from gdn_jax.training.dialogues import DOMAINS, generate
from gdn_jax.training.dialogues.dialogue import Dialogue
from gdn_jax.training.dialogues.glosses import BUILT_IN, read_glosses

PICO = model_folder("pico")
SHARES = {"chat": 0.40, "tools": 0.26, "arithmetic": 0.17, "json": 0.17}  # of the bytes
HELD_OUT = 300  # dialogues of each domain


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every file; return the exit status."""
    options = _parse(arguments)
    template, pairs = ChatTemplate.from_folder(PICO), _pairs(options.glosses)
    count = options.count or sys.maxsize
    total = None if options.count else round(options.megabytes * 1_000_000)
    with tqdm(total=total, unit="B", unit_scale=True, desc="dialogues", disable=options.quiet) as bar:
        for domain in DOMAINS:
            train = generate(domain, count, options.seed, pairs=pairs)
            held_out = generate(domain, min(count, HELD_OUT), options.seed, held_out=True, pairs=pairs)
            lines = (_line(dialogue, template) for dialogue in train)
            if total:
                lines = _up_to(round(total * SHARES[domain]), lines)
            packed = [
                _write(options.out / "train" / f"{domain}.jsonl.xz", lines, bar),
                _write(
                    options.out / "held_out" / f"{domain}.jsonl.xz",
                    (_line(dialogue, template, held_out=True) for dialogue in held_out),
                ),
            ]
            sys.stdout.write(f"{domain:12}{packed[0]:>12} bytes to train on,{packed[1]:>8} held out, packed\n")
    return 0


def rendered(dialogue: Dialogue, template: ChatTemplate) -> str:
    """Return the text of a whole dialogue; it ends where the assistant does."""
    return template.render(dialogue.messages, dialogue.tools, add_generation_prompt=False, variables=dialogue.template)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write generated dialogues.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train/ and held_out/")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other dialogues")
    parser.add_argument("--count", type=int, default=0, help="dialogues of each domain")
    parser.add_argument("--megabytes", type=float, default=30, help="text to train on, if there is no --count")
    parser.add_argument(
        "--glosses", type=Path, nargs="*", default=[], help="files of words and meanings, beside the built-in"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if options.count < 0 or not 0 < options.megabytes < math.inf:
        parser.error("--count must be at least 0, and --megabytes a number above 0")  # or it would never end
    return options


def _pairs(files: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Return words to ask for: everyday ones as often as all of the files'."""
    everyday = dict(BUILT_IN)
    others = [pair for pair in chain.from_iterable(map(read_glosses, files)) if pair[0] not in everyday]
    return BUILT_IN * max(1, len(others) // len(BUILT_IN)) + tuple(others)


def _line(dialogue: Dialogue, template: ChatTemplate, *, held_out: bool = False) -> tuple[str, int]:
    """Return a line of a file, and the bytes of its text."""
    text = rendered(dialogue, template)
    line: dict[str, object] = {"text": text, "source": "generated", "domain": dialogue.domain}
    if held_out:
        line |= {"messages": dialogue.messages, "tools": dialogue.tools, "template": dialogue.template}
    return json.dumps(line, ensure_ascii=False) + "\n", len(text.encode())


def _up_to(num_bytes: int, lines: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield lines until their texts have `num_bytes`."""
    total = 0
    for line, size in lines:
        yield line, size
        total += size
        if total >= num_bytes:
            return


def _write(path: Path, lines: Iterator[tuple[str, int]], bar: tqdm | None = None) -> int:
    """Write lines as xz; return the bytes of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for line, size in lines:
            file.write(line)
            if bar is not None:
                bar.update(size)
    return path.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
