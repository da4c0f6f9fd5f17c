"""Token ids to text as they arrive, never half a character.

Byte-level tokens are runs of bytes, so the text of a sequence is one UTF-8 stream and a decoder that keeps the last
unfinished character, at most three bytes, is all the state there is: O(1) a token, no window that could start inside a
character. What is invalid becomes U+FFFD by the same rule as in a decode of the whole (one per maximal ill-formed
prefix), as soon as the next byte shows that nothing can complete it; the start of an encoded surrogate (ED A0..BF),
which nothing completes either, one byte later.
"""

import codecs
from collections.abc import Iterable, Sequence

from gdn_jax.serving.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one request's output so far. For any split of the ids, all pushes and the flush join to one text.

    That text is `tokenizer.decode(ids)`, unless the prompt ends inside a character: then the output starts with that
    character, so that the prompt's text before it and the output join to `tokenizer.decode(prompt_ids + ids)`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Start after `prompt_ids`.

        Args:
            tokenizer: gives the bytes of each token.
            prompt_ids: the tokens before the output; only an unfinished character at their end matters.
            skip_special_tokens: leave special tokens out of the text.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _Utf8Decoder(errors="replace")
        self._decoder.decode(self._last_bytes(prompt_ids))

    def push(self, ids: Iterable[int]) -> str:
        """Add output tokens; return the characters that they complete."""
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def flush(self) -> str:
        """End the text; return U+FFFD for a character left unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)

    def peek(self, token_id: int) -> str:
        """Return the text of a token if it came next, and change nothing.

        A token of whole characters has its own text. One that holds part of a character has the characters that it
        completes after the tokens before it: none, if it only begins one.
        """
        own = self._bytes(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            state = self._decoder.getstate()
            text = self._decoder.decode(own)
            self._decoder.setstate(state)
            return text

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """Return an end of the text of `ids` long enough to hold its last character, however unfinished."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
        return tail
