"""Bad words as token sequences: what a text that must not appear looks like in tokens.

A word stands at the beginning of a text or after a blank, and byte-level tokens hold the blank, so each word is
tokenized both ways. vLLM leaves the form after a blank out where it has another number of tokens, which lets the word
through in the middle of a sentence; here both are always banned.
"""

from collections.abc import Sequence

from gdn_jax.serving.core.errors import InvalidParameterError, InvalidPromptError
from gdn_jax.serving.runner.adjust import MAX_WORD_TOKENS
from gdn_jax.serving.text.tokenizer import Tokenizer


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the distinct token sequences of words that are not blank; blanks before a word do not count.

    Raises:
        InvalidParameterError: a word has too many tokens, or is no valid Unicode.
    """
    forms = dict.fromkeys(tuple(_encode(prefix + word.lstrip(), tokenizer)) for word in words for prefix in ("", " "))
    if (longest := max(map(len, forms), default=0)) > MAX_WORD_TOKENS:
        raise InvalidParameterError(
            f"bad_words must have at most {MAX_WORD_TOKENS} tokens each; got one of {longest}; use the part of it that "
            "no other text has",
            parameter="bad_words",
        )
    return tuple(forms)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except InvalidPromptError as error:
        raise InvalidParameterError(f"bad_words: {error}", parameter="bad_words") from None
