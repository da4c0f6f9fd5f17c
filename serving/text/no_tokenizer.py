"""What stands in for the tokenizer of a model that has none: prompts are token ids, and answers have no text.

For random weights alone, whose text nobody reads: a folder with a config.json is then enough to run a size.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gdn_jax.serving.core.errors import InvalidPromptError
from gdn_jax.serving.text.tokenizer import GenerationDefaults, Tokenizer


class NoTokenizer(Tokenizer):
    """Every id of the model is a token, and none has any text."""

    def __init__(self, folder: Path | str, vocab_size: int, *, config_eos: Sequence[int] = ()) -> None:
        """Read what a model folder says of sampling and ending.

        Args:
            folder: of the model.
            vocab_size: number of ids the model has.
            config_eos: the end tokens that config.json names; those of generation_config.json come first.

        Raises:
            StartupError: generation_config.json cannot be used.
        """
        self.num_tokens = self.vocab_size = vocab_size
        self.special_tokens = ()
        self.generation_defaults = GenerationDefaults.from_folder(Path(folder))
        ends = self.generation_defaults.eos_token_ids or config_eos
        self.end_token_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id < vocab_size))

    def encode(self, text: str) -> list[int]:
        """Refuse any text.

        Raises:
            InvalidPromptError: always.
        """
        raise InvalidPromptError(
            "a model without tokenizer.json takes token ids alone; got text; set tokenizer to a folder that has one",
            parameter="prompt",
        )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return no text."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return nothing."""
        return b""

    def is_special(self, token_id: int) -> bool:
        """Say no of every id."""
        return False
