"""The server's metrics in Prometheus' form: a registry per app, the engine's numbers read when somebody asks."""

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

from gdn_jax.serving import metrics as names
from gdn_jax.serving.http.backend import Backend

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE = 2.0  # seconds to wait for the engine's numbers, which come between two steps; a compilation takes longer
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (
    1e0, 2e0, 5e0, 1e1, 2e1, 5e1, 1e2, 2e2, 5e2, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
)  # fmt: skip


class Metrics:
    """What the server counts, and what it reads from the engine. Belongs to one event loop."""

    def __init__(self, model: str, *, with_vllm_names: bool) -> None:
        """Start at zero.

        Args:
            model: label of vLLM's names.
            with_vllm_names: expose those too.
        """
        self._model, self._with_vllm_names = model, with_vllm_names
        self._stats: object = None
        self._registry = CollectorRegistry(auto_describe=False)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.generation_tokens = self._counter(names.GENERATION_TOKENS)
        self.live = Gauge(names.PREFIX + names.LIVE_REQUESTS.name, names.LIVE_REQUESTS.text, registry=self._registry)
        self.first_token = self._histogram(names.FIRST_TOKEN, _SECONDS)
        self.inter_token = self._histogram(names.INTER_TOKEN, _SECONDS)
        self.latency = self._histogram(names.LATENCY, _SECONDS)
        self.request_prompt = self._histogram(names.REQUEST_PROMPT, _TOKENS)
        self.request_generation = self._histogram(names.REQUEST_GENERATION, _TOKENS)
        self._completions = self._counter(names.COMPLETIONS, "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self._completions.labels(reason)
        self._requests = self._counter(names.HTTP_REQUESTS, "path", "status")
        self._registry.register(_Engine(self))  # pyright: ignore[reportArgumentType] - a collector by its one method

    def count_completion(self, reason: str) -> None:
        """Count a completion that ended."""
        self._completions.labels(reason).inc()

    def count_request(self, path: str, status: str) -> None:
        """Count an HTTP request; `path` is one of the server's own, `status` is "left" if its client did not wait."""
        self._requests.labels(path, status).inc()

    async def render(self, backend: Backend | None) -> bytes:
        """Return everything as text; the engine's last known numbers if it does not answer in time.

        Args:
            backend: the engine; None while there is none, and so no numbers of it.
        """
        if backend is not None and backend.is_running:
            try:
                async with asyncio.timeout(_PATIENCE):
                    self._stats = await backend.stats()
            except TimeoutError:
                pass
        return generate_latest(self)  # pyright: ignore[reportArgumentType] - it asks for `collect` alone

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, without the times of creation that the library adds to each."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if self._with_vllm_names and (renamed := self._renamed(family)) is not None:
                yield renamed

    def engine_families(self) -> Iterator[Metric]:
        """Yield what the engine counts, as it was when last asked."""
        stats = self._stats
        if stats is None:
            return
        for metric in names.ENGINE:
            value = getattr(stats, metric.field, None)
            if value is None:
                continue
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if not metric.label:
                yield family(names.PREFIX + metric.name, metric.text, value=value)
                continue
            by_place = family(names.PREFIX + metric.name, metric.text, labels=[metric.label])
            for place, one in enumerate(value):
                by_place.add_metric([str(place)], one)
            yield by_place
        usage = getattr(stats, "blocks_used", 0) / max(1, getattr(stats, "blocks", 0))
        yield GaugeMetricFamily(names.PREFIX + names.KV_USAGE.name, names.KV_USAGE.text, value=usage)

    def _renamed(self, family: Metric) -> Metric | None:
        """Return a metric under vLLM's name and with its labels; None if it has none."""
        suffix = "_total" if family.type == "counter" else ""
        known = _VLLM.get(family.name + suffix)
        if known is None:
            return None
        ours, theirs = family.name, known.removesuffix(suffix)
        renamed = Metric(theirs, family.documentation, family.type)
        labels = {"model_name": self._model, "engine": "0"}
        renamed.samples = [
            Sample(sample.name.replace(ours, theirs, 1), {**sample.labels, **labels}, sample.value)
            for sample in family.samples
        ]
        return renamed

    def _counter(self, metric: names.Metric, *labels: str) -> Counter:
        return Counter(names.PREFIX + metric.name, metric.text, labels, registry=self._registry)

    def _histogram(self, metric: names.Metric, buckets: Sequence[float]) -> Histogram:
        return Histogram(names.PREFIX + metric.name, metric.text, buckets=buckets, registry=self._registry)


class _Engine:
    """The engine's numbers as a collector of the registry."""

    def __init__(self, owner: Metrics) -> None:
        self._owner = owner

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        return self._owner.engine_families()


_VLLM = {names.PREFIX + metric.name: metric.vllm for metric in (*names.ENGINE, *names.SERVER) if metric.vllm}
