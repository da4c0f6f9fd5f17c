"""Typed reads of a published config's keys.

Owns one rule: a value of the wrong type never gets past here, and the error names the key where it stands in the file.
It knows nothing of what a key means. JSON null counts as an absent key, as in the files that publish these models.
"""

from collections.abc import Mapping, Sequence

from gdn_jax.errors import ConfigError

INT_LIMIT = 2**31  # sizes and ids index arrays with 32-bit integers
NUMBER_LIMIT = 1e30  # products of two numbers, or of a number and a size, stay finite


class ConfigKeys:
    """One JSON object of a config, with the name under which it stands."""

    def __init__(self, values: Mapping[str, object], name: str = "") -> None:
        """Wrap an object.

        Args:
            values: the JSON object.
            name: dotted name of the object in the file; empty for the file's top level.
        """
        self.values = values
        self._prefix = f"{name}." if name else ""

    def path(self, key: str) -> str:
        """Return the dotted name of a key in the file, for messages."""
        return self._prefix + key

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.values.get(key) is not None

    def raw(self, key: str) -> object:
        """Return a value as it stands; None when absent."""
        return self.values.get(key)

    def names(self) -> list[str]:
        """Return the keys that are there and not null."""
        return [key for key in self.values if self.has(key)]

    def integer(self, key: str, default: int) -> int:
        """Return a whole number in 0..2^31 - 1; booleans are none.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        return default if value is None else self._checked_integer(value, self.path(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers, or a single one as a list of one; empty when absent.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        return tuple(self._checked_integer(item, self.path(key)) for item in items)

    def number(self, key: str, default: float | None) -> float:
        """Return a number above 0 and below 1e30.

        Raises:
            ConfigError: the value is something else, or there is none and no default either.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        # The comparison also refuses NaN and infinities.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < NUMBER_LIMIT:
            raise ConfigError(
                f"{self.path(key)} must be a number above 0 and below {NUMBER_LIMIT:g}; got {shown(value)}; correct it"
            )
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path(key)} must be true or false, unquoted; got {shown(value)}; correct it")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.path(key)} must be a string; got {shown(value)}; put it in quotes")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty when absent.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.path(key)} must be a list of strings; got {shown(value)}; correct it")
        return tuple(value)

    def table(self, key: str) -> "ConfigKeys | None":
        """Return the object under a key; None when absent.

        Raises:
            ConfigError: the value is not an object.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path(key)} must be a JSON object; got {shown(value)}; correct or remove it")
        return ConfigKeys(value, self.path(key))

    @staticmethod
    def _checked_integer(value: object, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < INT_LIMIT:
            raise ConfigError(
                f"{path} must be a whole number, unquoted, in 0..2^31 - 1; got {shown(value)}; correct it"
            )
        return value


def shown(value: object) -> str:
    """Return a value for a message, cut to a readable length."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_of(names: Sequence[str]) -> str:
    """Return names for a message: "a", "a or b", "a, b or c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
