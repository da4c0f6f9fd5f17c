"""One record per HTTP request: what the log's line and the metrics say of it. Never the text."""

import json
import logging
import time
from dataclasses import dataclass, field
from random import getrandbits
from typing import cast

from starlette.types import Scope

from gdn_jax.serving.http.metrics import Metrics

_LOG = logging.getLogger(__name__)
_KEY = "gdn_jax.record"


@dataclass(kw_only=True)
class Record:
    """One request, from its arrival to its end.

    Attributes:
        request_id: of the header x-request-id.
        method: of HTTP.
        path: the route's path; "other" where there is none, so that clients cannot invent labels.
        metrics: counts what happens.
        began: when it arrived, of the monotonic clock.
        status: HTTP status; 0 if nothing was answered.
        outcome: how it ended: finish reasons, or "abort", "timeout", "error", "refused".
        body_read: whether its body was read whole.
        stream: whether it streams.
        prompt_tokens: of all prompts.
        cached_tokens: of those, from the prefix cache.
        completion_tokens: generated.
        drafts: by choice, accepted and rejected draft tokens so far.
        first_token: seconds until the first token; None without one.
    """

    request_id: str
    method: str
    metrics: Metrics
    path: str = "other"
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    outcome: str = ""
    body_read: bool = False
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    first_token: float | None = None
    _last: dict[int, float] = field(default_factory=dict[int, float])

    def enter(self, scope: Scope) -> None:
        """Make it the scope's."""
        scope[_KEY] = self

    def took(self, choice: int, num_tokens: int) -> None:
        """Note that a choice got tokens just now."""
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now - self.began
            self.metrics.first_token.observe(self.first_token)
            self.metrics.prompt_tokens.inc(self.prompt_tokens)
        last = self._last.get(choice)
        if last is not None:
            # tokens of one step arrive together; each gets its share of the time
            for _ in range(num_tokens):
                self.metrics.inter_token.observe((now - last) / num_tokens)
        self._last[choice] = now
        self.completion_tokens += num_tokens
        self.metrics.generation_tokens.inc(num_tokens)

    def generated(self) -> None:
        """Note that a generation request is over, however it ended."""
        self.metrics.latency.observe(time.perf_counter() - self.began)
        self.metrics.request_prompt.observe(self.prompt_tokens)
        self.metrics.request_generation.observe(self.completion_tokens)

    def close(self) -> None:
        """Write the log's line and count the request."""
        self.metrics.count_request(self.path, str(self.status) if self.status else "left")
        fields = self.fields()
        level = logging.INFO if self.method == "POST" or self.status >= 400 else logging.DEBUG
        if _LOG.isEnabledFor(level):
            words = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, ""))
            _LOG.log(level, "%s", words, extra={"fields": fields})

    def fields(self) -> dict[str, object]:
        """Return what is said of it, by name; times in seconds."""
        common: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.perf_counter() - self.began, 4),
            "outcome": self.outcome,
        }
        if not self.prompt_tokens:
            return common
        return common | {
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_seconds": None if self.first_token is None else round(self.first_token, 4),
        }


def fresh_hex() -> str:
    """Return 32 hexadecimal digits that nobody else has; they name things and guard none."""
    return f"{getrandbits(128):032x}"


def record_of(scope: Scope) -> Record:
    """Return the record of a request."""
    return cast("Record", scope[_KEY])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and a request's fields as they are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else {"message": "request", **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
