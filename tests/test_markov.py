"""The models that are a table are what they say: an independent float64 model reads the table back from their files."""

from pathlib import Path

import numpy as np
import pytest
from oracles.markov import (
    ALPHABET,
    HOPELESS,
    MIXED,
    NUM_CLASSES,
    NUM_TOKENS,
    PEAK,
    PERFECT,
    class_of,
    prompt_before,
    write_markov,
)
from oracles.speculation_rig import DraftOracle


@pytest.mark.parametrize("head", [PERFECT, MIXED, HOPELESS], ids=["perfect", "mixed", "hopeless"])
def test_logits_are_rows_of_the_table_and_drafts_those_of_the_head(head: tuple[int, ...], tmp_path: Path) -> None:
    model = write_markov(tmp_path, head=head)
    oracle = DraftOracle(tmp_path)
    prompt = prompt_before(4, 20)
    text = [*prompt, *model.answer(prompt, 40)]
    logits = oracle.model.logits(text)
    np.testing.assert_allclose(logits[:, ALPHABET], model.table[[class_of(token) for token in text]], atol=1e-5)
    others = [token for token in range(NUM_TOKENS) if token not in ALPHABET]
    assert logits[:, others].max() < 0 < PEAK < logits[:, NUM_TOKENS:].min()  # padding wins wherever it may
    for num_known in range(len(prompt), len(text) - 4):
        drafts, gaps = oracle.drafts(tuple(text), num_known, 4)
        assert drafts == model.drafts(text[num_known - 1], 4)
        assert min(gaps) > 1.0
        right = model.num_right(text[num_known - 1], 4)
        assert drafts[:right] == text[num_known : num_known + right]
        assert drafts[right : right + 1] != text[num_known + right : num_known + right + 1] or right == 4


def test_the_mixed_head_is_right_any_number_of_times_in_a_row(tmp_path: Path) -> None:
    perfect, mixed = write_markov(tmp_path / "a"), write_markov(tmp_path / "b", head=MIXED)
    assert {mixed.num_right(token, 4) for token in ALPHABET} == {0, 1, 2, 3, 4}
    assert {perfect.num_right(token, 8) for token in ALPHABET} == {8}
    assert perfect.answer([ALPHABET[0]], NUM_CLASSES)[-1] == ALPHABET[0]
