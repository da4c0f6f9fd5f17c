"""What the benchmark of the shipped model asks and counts, without a model."""

import numpy as np

from benchmarks import pico
from gdn_jax.training.corpus import DomainTokens


def test_packed_rows_hold_every_document_once_and_whole():
    documents = [np.arange(10 * n, 10 * n + length) for n, length in enumerate((5, 3, 8, 1, 6))]
    rows = pico._packed(documents, 8)
    assert rows.shape[1:] == (2, 8)
    for index, document in enumerate(documents):
        row, *others = np.unique(np.nonzero(rows[:, 1] == index)[0])
        assert not others
        np.testing.assert_array_equal(rows[row, 0][rows[row, 1] == index], document)
    assert np.sum(rows[:, 1] != pico._PAD) == sum(map(len, documents))


def test_prompts_are_the_starts_of_the_first_documents_that_are_long_enough():
    lengths = (3, 9, 2, 7, 8)
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    tokens = DomainTokens(tokens=np.arange(starts[-1], dtype=np.uint16), starts=starts)
    arguments = pico.Arguments(text=("unused",), prompts=2, prompt_tokens=4)
    assert [prompt["prompt_token_ids"] for prompt in pico._prompts(arguments, tokens)] == [
        [3, 4, 5, 6],
        [14, 15, 16, 17],
    ]


def test_the_last_question_goes_with_the_answer_behind_it_and_without_thoughts():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    messages += [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "done"}]
    opened = "<|im_start|>assistant\n"
    text = f"{opened}first<|im_end|>\n{opened}<think>\nhm\n</think>\n\ncall<|im_end|>\n{opened}done<|im_end|>\n"
    assert pico._last_question({"messages": messages, "text": text}) == (messages[:4], "call")


def test_the_distinct_share_counts_each_answer_for_itself():
    assert pico._distinct_share([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 1.0
    assert pico._distinct_share([[1] * 8, [2, 3]]) == 1 / 5
