"""Measure the shipped model on text that it was not trained on: loss, drafting, and whether answers end by themselves.

    JAX_PLATFORMS=cpu python -m benchmarks.pico --text FOLDER [FOLDER ...]

The folders are those that the model was trained from; its card says how to gather them again. The metrics:

- `nats_per_token`: mean of -log P, in float32, of the first 60,000 or so held-out tokens of each domain (`--tokens`),
  but for the first of each document; documents are cut at the length of the rows that the model was trained on.
  "all" is the mean over all of them, so a domain counts as much as it has tokens there.
- `ngram_nats_per_token`: the same tokens by a Kneser-Ney n-gram model of all training text (implementation "ngram").
- `tokens_per_verify`: through the engine, prompts from the start of held-out documents, answers as the model goes on;
  greedy, and at temperature 0.8 with the noise that target and drafter share. Greedy text of a small model repeats
  itself, which is easy to draft; `distinct_share`, the share of 4-grams of an answer that are different, says how much.
- `ends_by_itself`: share of held-out dialogues whose last user message gets an answer that ends with an end token.
  `right_answers` is the share of the same dialogues whose answer equals the one that the dialogue's generator gave.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from benchmarks.ngram import NgramModel
from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams
from gdn_jax.model import LanguageModel, load_model
from gdn_jax.shipped import model_folder
from gdn_jax.training.corpus import Corpus, DomainTokens, Text
from gdn_jax.training.text_files import domain_files, read_documents

DOMAINS = ("code", "docs", "prose", "glosses", "chat", "tools", "arithmetic", "json")
DIALOGUES = ("chat", "tools", "arithmetic", "json")
_PASS_ROWS = 8  # rows of one pass
_PAD = -1  # no token
_WHOLE = 1 << 40  # more tokens than any document has


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        text: folders with train/ and held_out/.
        output: JSON file for the results.
        cache: folder in which tokenized text is kept; empty for none.
        model: folder or name of the model.
        order: tokens of an n-gram; 0 leaves the n-gram model out.
        row: tokens after which a document is cut; what the model was trained on.
        tokens: held-out tokens per domain that are scored.
        prompts: held-out documents per domain that are gone on with.
        prompt_tokens: tokens of them that are given.
        new_tokens: tokens that are generated.
        drafts: most drafts per step; fewer are measured too.
        dialogues: held-out dialogues in all.
    """

    text: tuple[str, ...]
    output: Path = Path("benchmarks/results/pico.json")
    cache: str = ""
    model: str = "pico"
    order: int = 5
    row: int = 2048
    tokens: int = 60_000
    prompts: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 128
    drafts: int = 3
    dialogues: int = 100


def main(arguments: Arguments) -> None:
    """Measure, print and store."""
    corpus = Text(model_folder(arguments.model)).read(arguments.text, DOMAINS, cache=arguments.cache)
    rows: list[ResultRow] = []
    for row in chain(_losses(arguments, corpus), _drafting(arguments, corpus), _answers(arguments)):
        rows.append(row)
        sys.stdout.write(f"{row.case:32} {row.metric:22} {row.implementation:6} {row.value:8.3f} {row.unit}\n")
        sys.stdout.flush()  # the whole takes a quarter of an hour
    write_results(arguments.output, "pico", rows)


def _documents(tokens: DomainTokens, length: int) -> Iterator[np.ndarray]:
    """Yield the documents of a domain, cut at a length."""
    for start, end in zip(tokens.starts[:-1], tokens.starts[1:], strict=True):
        yield tokens.tokens[start:end][:length].astype(np.int64)


def _some(tokens: DomainTokens, length: int, number: int) -> list[np.ndarray]:
    """Return documents from the first on, until they have `number` tokens."""
    chosen: list[np.ndarray] = []
    for document in _documents(tokens, length):
        if sum(map(len, chosen)) >= number:
            break
        chosen.append(document)
    return chosen


# --- loss ---


def _losses(arguments: Arguments, corpus: Corpus) -> Iterator[ResultRow]:
    held_out = {name: _some(corpus.held_out[name], arguments.row, arguments.tokens) for name in DOMAINS}
    model = load_model(arguments.model, dtype="float32")
    ours = {name: _model_nats(model, documents, arguments.row) for name, documents in held_out.items()}
    yield from _loss_rows(ours, "nats_per_token", "ours")
    if arguments.order:
        training = (document for name in DOMAINS for document in _documents(corpus.train[name], _WHOLE))
        ngram = NgramModel(training, order=arguments.order, vocab_size=model.config.vocab_size, pad=corpus.end_token)
        theirs = {name: ngram.nats(documents, skip=1) for name, documents in held_out.items()}
        yield from _loss_rows(theirs, "ngram_nats_per_token", "ngram")


def _loss_rows(nats: Mapping[str, tuple[float, int]], metric: str, implementation: str) -> Iterator[ResultRow]:
    total = tuple(map(sum, zip(*nats.values(), strict=True)))
    for name, (value, number) in [*nats.items(), ("all", total)]:
        yield _row(f"pico/{name}", metric, value / number, "nats", implementation)


def _model_nats(model: LanguageModel, documents: Sequence[np.ndarray], length: int) -> tuple[float, int]:
    """Return the sum of -log P over all tokens but the first of each document, and their number."""
    graph, params = nnx.split(model)
    rows = _packed(documents, length)
    total, number = 0.0, 0
    for first in range(0, len(rows), _PASS_ROWS):
        part = rows[first : first + _PASS_ROWS]
        part = np.concatenate([part, np.full((_PASS_ROWS - len(part), 2, length), _PAD)])
        token_ids, document = part[:, 0], part[:, 1]
        nats = np.asarray(_pass_nats(graph, params, jnp.asarray(np.maximum(token_ids, 0)), jnp.asarray(document + 1)))
        counted = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] != _PAD)
        total, number = total + float(nats[counted].sum(dtype=np.float64)), number + int(counted.sum())
    return total, number


def _packed(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return rows of [token ids, document], `[rows, 2, length]`, whole documents one after the other, then pads."""
    rows: list[np.ndarray] = []
    used = length
    for index, document in enumerate(documents):
        if used + len(document) > length:
            rows.append(np.full((2, length), _PAD))
            used = 0
        rows[-1][0, used : used + len(document)] = document
        rows[-1][1, used : used + len(document)] = index
        used += len(document)
    return np.stack(rows)


@partial(jax.jit, static_argnums=0)
def _pass_nats(graph: nnx.GraphDef, params: nnx.State, token_ids: jax.Array, document: jax.Array) -> jax.Array:
    decoder = nnx.merge(graph, params).decoder
    # Pads are the last document of a row, and documents are counted from 1: 0 may follow a larger number.
    logprobs = jax.nn.log_softmax(decoder.logits(decoder.forward(token_ids, document)))
    return -jnp.take_along_axis(logprobs[:, :-1], token_ids[:, 1:, None], axis=-1)[..., 0]


# --- drafting ---


def _drafting(arguments: Arguments, corpus: Corpus) -> Iterator[ResultRow]:
    prompts = {name: _prompts(arguments, corpus.held_out[name]) for name in ("code", "docs", "prose", "glosses")}
    for drafts in range(1, arguments.drafts + 1):
        llm = LLM(
            arguments.model,
            speculative_tokens=drafts,
            max_num_seqs=8,
            max_model_len=arguments.prompt_tokens + arguments.new_tokens,
        )
        for mode, temperature in (("greedy", 0.0), ("t0.8", 0.8)):
            for name, given in prompts.items():
                params = [
                    SamplingParams(temperature=temperature, max_tokens=arguments.new_tokens, seed=seed)
                    for seed in range(len(given))
                ]
                before = llm.stats()
                outputs = llm.generate(given, params, use_tqdm=False)
                after = llm.stats()
                case = f"pico/{name}/{mode}/k{drafts}"
                yield _row(case, "tokens_per_verify", after.tokens_per_verify_since(before), "tokens")
                if drafts == arguments.drafts:
                    answers = [output.outputs[0].token_ids for output in outputs]
                    yield _row(case, "distinct_share", _distinct_share(answers), "ratio")


def _prompts(arguments: Arguments, tokens: DomainTokens) -> list[Any]:
    """Return the first tokens of documents that have more than those, or all but the end of shorter ones."""
    prompts = [document[:-1][: arguments.prompt_tokens].tolist() for document in _documents(tokens, arguments.row)]
    longest = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # stable: the first of equal length
    return [{"prompt_token_ids": prompts[index]} for index in sorted(longest[: arguments.prompts])]


def _distinct_share(answers: Sequence[Sequence[int]]) -> float:
    grams = [[tuple(answer[i : i + 4]) for i in range(len(answer) - 3)] for answer in answers]
    return sum(len(set(one)) for one in grams) / max(sum(len(one) for one in grams), 1)


# --- answers ---


def _answers(arguments: Arguments) -> Iterator[ResultRow]:
    llm = LLM(arguments.model, speculative_tokens=arguments.drafts, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=256)
    ended, right = {}, {}
    for name in DIALOGUES:
        dialogues = _dialogues(arguments.text, name)[: arguments.dialogues // len(DIALOGUES)]
        ended[name] = right[name] = (0, len(dialogues))
        for dialogue in dialogues:
            messages, wanted = _last_question(dialogue)
            options = {"tools": dialogue["tools"] or None, "chat_template_kwargs": dialogue["template"]}
            (output,) = llm.chat(messages, params, use_tqdm=False, **options)
            completion = output.outputs[0]
            ended[name] = _counted(ended[name], completion.finish_reason == "stop")
            right[name] = _counted(right[name], _without_thoughts(completion.text) == wanted)
    for metric, counts in (("ends_by_itself", ended), ("right_answers", right)):
        total = tuple(map(sum, zip(*counts.values(), strict=True)))
        for name, (value, number) in [*counts.items(), ("all", total)]:
            yield _row(f"pico/{name}/greedy/k{arguments.drafts}", metric, value / number, "ratio")


def _counted(count: tuple[int, int], is_hit: bool) -> tuple[int, int]:
    return count[0] + is_hit, count[1]


def _last_question(dialogue: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages up to the last one of the user, and the answer that stands behind it, rendered."""
    messages = dialogue["messages"]
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    turn = 1 + sum(message["role"] == "assistant" for message in messages[:last])
    answer = dialogue["text"].split("<|im_start|>assistant\n")[turn].split("<|im_end|>")[0]
    return messages[: last + 1], _without_thoughts(answer)


def _without_thoughts(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def _dialogues(folders: Sequence[str], name: str) -> list[dict[str, Any]]:
    found = [document for path in domain_files(folders, "held_out", name) for document in read_documents(path)]
    if not found:
        raise SystemExit(f"no number is reported: no held_out/{name}.jsonl.xz in {', '.join(folders)}")
    return found


def _row(case: str, metric: str, value: float, unit: str, implementation: str = "ours") -> ResultRow:
    return ResultRow(case=case, metric=metric, value=value, unit=unit, implementation=implementation, error=None)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
