"""ServerConfig: everything a person may set about the server, checked once, complete from then on."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from gdn_jax.serving.config import SettingError

MetricsCompat = Literal["none", "vllm"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    Attributes:
        host: address to listen on; 0.0.0.0 for every interface.
        port: port to listen on; 0 takes a free one.
        served_model_name: names that requests may call the model by, the first one for answers; none: the model's path.
        api_key: keys of which requests must bring one, as a bearer token; none: no key is asked for.
        api_key_file: file with further keys, one a line, so that none shows in the list of processes.
        allowed_origins: origins that browsers may call from; * for any; none: no CORS headers.
        ssl_certfile: certificate chain for HTTPS.
        ssl_keyfile: its private key.
        max_body_mib: largest request body.
        max_waiting: most completions that wait for the engine; beyond it requests get 429.
        request_timeout: seconds that a request may take in all; 0: no limit.
        body_timeout: seconds that a request's body may take to arrive.
        drain_timeout: seconds that running requests get to finish after SIGTERM.
        keep_alive: seconds that an idle connection stays open.
        chat_template_kwargs: JSON object with names for the chat template; a request's own win.
        metrics_compat: vllm also exposes vLLM's metric names.
        log_json: one JSON object per log line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str = ""
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    max_body_mib: float = 16.0
    max_waiting: int = 512
    request_timeout: float = 0.0
    body_timeout: float = 60.0
    drain_timeout: float = 60.0
    keep_alive: int = 75
    chat_template_kwargs: str = ""
    metrics_compat: MetricsCompat = "none"
    log_json: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            SettingError: a value lies outside its range, or a file is not there; the message has the rule.
        """
        for name, (admits, words) in _RULES.items():
            if not admits(getattr(self, name)):
                raise SettingError(f"{name} must be {words}; got {getattr(self, name)!r}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise SettingError("ssl_certfile and ssl_keyfile must be given together; give both, or neither for HTTP")
        for name in ("ssl_certfile", "ssl_keyfile", "api_key_file"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise SettingError(f"{name} must be a file; there is none at {path}")
        self.template_variables()
        if not all(key.isascii() and key.isprintable() and key.strip() for key in self.keys()):
            raise SettingError("api keys must be printable ASCII, as they travel in a header; choose another key")

    def keys(self) -> tuple[str, ...]:
        """Return every key, those of the file too."""
        lines = Path(self.api_key_file).read_text().splitlines() if self.api_key_file else []
        return (*self.api_key, *(line.strip() for line in lines if line.strip()))

    def template_variables(self) -> dict[str, object]:
        """Return `chat_template_kwargs` as a mapping.

        Raises:
            SettingError: it is not a JSON object.
        """
        if not self.chat_template_kwargs:
            return {}
        try:
            value: object = json.loads(self.chat_template_kwargs)
        except ValueError as error:
            raise SettingError(
                f"chat_template_kwargs must be JSON: {error}; got {self.chat_template_kwargs!r}"
            ) from None
        if not isinstance(value, dict):
            raise SettingError(f"chat_template_kwargs must be a JSON object; got {self.chat_template_kwargs!r}")
        return cast("dict[str, object]", value)

    @property
    def max_body_bytes(self) -> int:
        """The largest request body, in bytes."""
        return int(self.max_body_mib * (1 << 20))


def _at_least(low: int) -> tuple[Callable[[float], bool], str]:
    return lambda value: low <= value < float("inf"), f"a finite number of at least {low}"


_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "port": (lambda value: 0 <= value <= 65535, "in 0..65535"),
    "max_body_mib": (lambda value: 0 < value < float("inf"), "a finite number above 0"),
    "max_waiting": _at_least(0),
    "request_timeout": _at_least(0),
    "body_timeout": (lambda value: 0 < value < float("inf"), "a finite number above 0"),
    "drain_timeout": _at_least(0),
    "keep_alive": _at_least(0),
}
