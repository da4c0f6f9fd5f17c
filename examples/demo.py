"""Show a small trained model at work: text that streams, a second turn that hits the cache, and drafts that stand.

python examples/demo.py [MODEL]

MODEL is a folder of a release with a draft head, or the name of a shipped model; "pico" if left out. Every answer takes
the likeliest tokens, so everybody sees the same ones.
"""

import logging
import sys
import time
from collections.abc import Iterator

from gdn_jax import LLM, RequestOutput, RequestOutputKind, SamplingParams

# One request at a time, a prompt 64 tokens at a step: few shapes, and each costs a compilation.
SETTINGS = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 1024, "speculative_tokens": 3}

# A text to go on with, and what ends it: a sentence, a function.
TEXTS = (("The captain of the ship", "."), ("def load(path):\n    with open(path", "\n\n"))
SYSTEM = (
    "You are Ada, a helpful assistant. Be kind. Answer in short sentences. You help with questions, lists, sums and "
    "JSON. You remember what you are told, and you say so when you do not know a thing."
)
TURNS = (
    "What is your name?",
    "My friend Anna is 34 years old, works as a baker and lives in Paris.",
    "How old is Anna?",
    "What is the job of Anna?",
)
SUM = "What is 374 + 858?"


def start(model: str = "pico", **settings: object) -> LLM:
    """Load a model and compile its steps, which takes most of a first run's time."""
    say(f"{model}: compiling (half a minute, kept for the next run) ... ")
    began = time.monotonic()
    llm = LLM(model, **SETTINGS, use_tqdm=False, **settings)
    llm.generate("One", greedy(2), use_tqdm=False)  # a prefill step and a decode step: all that is used here
    say(f"{time.monotonic() - began:.0f} s\n")
    return llm


def go_on(llm: LLM) -> None:
    """Go on with a line of prose and with a line of code."""
    for prompt, end in TEXTS:
        say(prompt)
        show(llm.stream(prompt, greedy(64, stop=end, include_stop_str_in_output=True)))
        say("\n\n")


def talk(llm: LLM) -> list[int]:
    """Hold a conversation; each turn finds the turns before it in the cache.

    Returns:
        How many tokens of each turn's prompt were cached.
    """
    messages, cached = [{"role": "system", "content": SYSTEM}], list[int]()
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        say(f"user       {question}\nassistant  ")
        output, text = show(llm.stream_chat(messages, greedy(60)))
        messages.append({"role": "assistant", "content": text})
        cached.append(output.num_cached_tokens or 0)
        say(f"\n           [{len(output.prompt_token_ids)} prompt tokens, {cached[-1]} of them from the cache]\n")
    return cached


def calculate(llm: LLM) -> str:
    """Let the model think about a sum, digit by digit."""
    say(f"user       {SUM}\nassistant  <think>\n")
    thinking = {"enable_thinking": True}
    _, text = show(llm.stream_chat([{"role": "user", "content": SUM}], greedy(120), chat_template_kwargs=thinking))
    return text


def say(text: str) -> None:
    """Write to the terminal at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show(outputs: Iterator[RequestOutput]) -> tuple[RequestOutput, str]:
    """Write an answer while it comes; return its last part, and the whole text."""
    parts, output = list[str](), None
    for output in outputs:
        parts.append(output.outputs[0].text)
        say(parts[-1])
    assert output is not None  # a stream has at least the item that says why it ended
    return output, "".join(parts)


def greedy(max_tokens: int, **ends: str | bool) -> SamplingParams:
    """Take the likeliest tokens, and hand out each step's news alone."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **ends)


def main(model: str) -> None:
    """Run the show."""
    logging.basicConfig(level=logging.WARNING)
    llm = start(model)
    say("\n== Text that goes on, streamed\n\n")
    go_on(llm)
    say("== A conversation, whose turns find the ones before them in the prefix cache\n\n")
    talk(llm)
    say("\n== A sum, thought about\n\n")
    calculate(llm)
    stats = llm.stats()
    say("\n\n== Drafts of the model's own multi-token-prediction head\n\n")
    say(f"{stats.tokens_per_verify:.2f} tokens per step: ")
    say(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts stood\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pico")
