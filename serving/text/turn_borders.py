"""Where a prompt stops being a prefix of the next turn's prompt.

Templates rewrite what follows the last user message once the conversation goes on: reasoning is dropped, the generation
prompt makes way for the answer. A state saved behind that point is never found again, one at or before it is; the token
count of the point, a turn border, tells the prefix cache where to save.
"""

from collections.abc import Iterable, Sequence

from gdn_jax.serving.text.tokenizer import Tokenizer


def turn_borders(
    tokenizer: Tokenizer, prompt: str, prompt_ids: Sequence[int], next_turns: Iterable[str]
) -> tuple[int, ...]:
    """Return how many of the prompt's tokens each sample of a next turn shares, ascending, each count once.

    Only text around the border is encoded: text between two special tokens is encoded the same whatever is around it.

    Args:
        tokenizer: made `prompt_ids` from `prompt`.
        prompt: the rendered conversation.
        prompt_ids: its tokens.
        next_turns: rendered samples of the next request (`ChatTemplate.next_turns`).
    """
    special_places = [place for place, token_id in enumerate(prompt_ids) if tokenizer.is_special(token_id)]
    borders: set[int] = set()
    for text in next_turns:
        shared = _shared_length(prompt, text)
        # the last special token that both texts hold whole
        start = max([0, *(prompt.rfind(token, 0, shared) for token in tokenizer.special_tokens)])
        num_before = sum(prompt.count(token, 0, start) for token in tokenizer.special_tokens)
        border, goes_on = special_places[num_before] if start else 0, True
        # Once, but where other text has the same tokens, as an accent by itself has that is joined to its letter.
        while goes_on and start < len(text):
            ends = [text.find(token, start + 1) for token in tokenizer.special_tokens]
            end = min([len(text), *(end for end in ends if end >= 0)])
            ids = tokenizer.encode(text[start:end])
            num_shared = _shared_length(prompt_ids[border : border + len(ids)], ids)
            border, start, goes_on = border + num_shared, end, num_shared == len(ids)
        borders.add(border)
    return tuple(sorted(borders))


def _shared_length[T: (str, Sequence[int])](left: T, right: T) -> int:
    """Return the length of the longest common prefix, by bisection: comparing slices is fast, item by item is not."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
