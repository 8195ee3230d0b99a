"""Prometheus metrics of the HTTP frontend (spec/frontend.md 5.1), in a registry that is passed in.

Labels are bounded: ``model`` is a primary name of a registered model or ``unknown_model``. The children of a model are
looked up once and kept; ``forget`` drops those of a model that left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from dynamo_es.frontend.chat_media import NO_MEDIA, MediaCounts
from dynamo_es.frontend.errors import CLIENT_CLOSED, INCOMPLETE, OVERLOADED, PREPROCESS_FULL, QUEUE_FULL, WORKER_FULL
from dynamo_es.frontend.metrics_tokenizer import TokenizerCacheCollector
from dynamo_es.frontend.tally import CounterFamily, GaugeFamily, HistogramFamily, TallyCollector
from dynamo_es.frontend.tokenizer_cache import CacheTally

UNKNOWN_MODEL = "unknown_model"
CONTENT_TYPE = "text/plain; charset=utf-8"

_DURATION = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
_FIRST_TOKEN = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
_INTER_TOKEN = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44),
    80,
)
_INPUT = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_OUTPUT = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
_MEDIA = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 40, 50, 100)
_TOKENIZE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_MIGRATION = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)
_TEMPLATE = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)

_FAILURES = {
    400: ("InvalidRequest", "request.invalid"),
    404: ("NotFound", "request.not_found"),
    413: ("PayloadTooLarge", "request.payload_too_large"),
    415: ("UnsupportedMedia", "request.unsupported_media"),
    INCOMPLETE: ("InvalidRequest", "request.incomplete_body"),
    CLIENT_CLOSED: ("Cancelled", "request.cancelled"),
    501: ("NotImplemented", "runtime.not_implemented"),
    503: ("Unavailable", "backend.unavailable"),
    504: ("Timeout", "backend.timeout"),
    OVERLOADED: ("CapacityExhausted", "capacity.pool_exhausted"),
}
_LIMITS: Mapping[str | None, tuple[str, str]] = {
    QUEUE_FULL: ("CapacityExhausted", "capacity.queue_full"),
    WORKER_FULL: ("CapacityExhausted", "capacity.worker_full"),
    PREPROCESS_FULL: ("CapacityExhausted", "capacity.preprocess_queue_full"),
}


def error_type(status: int) -> str:
    """Label ``error_type`` for an HTTP status; empty for success."""
    if status < 400:
        return ""
    named = {
        404: "not_found", INCOMPLETE: "incomplete_body", CLIENT_CLOSED: "cancelled", 501: "not_implemented",
        503: "unavailable",
    }  # fmt: skip
    if status in named:
        return named[status]
    if status in (OVERLOADED, 429):
        return "overload"
    return "validation" if status < 500 else "internal"


class FrontendMetrics:
    """The families, and the children of each model. Belongs to one event loop.

    Args:
        registry: Where they are registered; one frontend a registry and prefix.
        prefix: ``dynamo_frontend``.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str = "dynamo_frontend") -> None:
        self.registry = registry
        self._prefix = prefix
        self._collector = TallyCollector()
        self._models: dict[str, ModelMetrics] = {}
        request = ("endpoint", "model", "request_type")
        self.started = self._counter("requests_started_total", "Requests accepted by a handler", *request)
        self._finished = self._counter(
            "requests_total", "Requests finished", "endpoint", "error_type", "model", "request_type", "status"
        )
        self._failures = self._counter("failures_total", "Terminal failures by class", "class", "reason")
        self.cancelled = self._counter("model_cancellation_total", "Requests whose client went away", *request)
        self._refused = self._counter(
            "requests_refused_total", "Requests refused before they were read: too many in progress", "endpoint"
        )
        self._rejected = self._counter(
            "model_rejection_total", "Requests refused because nobody had room for them", "endpoint", "model"
        )
        self.active = self._gauge("active_requests", "Requests from handler entry to response completion", "model")
        self.inflight = self._gauge("inflight_requests", "Requests at a worker", "model")
        self.queued = self._gauge("queued_requests", "Requests waiting for their first token", "model")
        gone = self._gauge("disconnected_clients", "Clients that went away and whose request is being cleaned up")
        self.disconnected_clients = gone.child()
        self.duration = self._histogram("request_duration_seconds", "Time to the end of a request", _DURATION)
        self.first = self._histogram("time_to_first_token_seconds", "Time to the first token", _FIRST_TOKEN)
        self.between = self._histogram("inter_token_latency_seconds", "Time between tokens", _INTER_TOKEN)
        self.input = self._histogram("input_sequence_tokens", "Prompt length in tokens", _INPUT)
        self.output = self._histogram("output_sequence_tokens", "Output length in tokens", _OUTPUT)
        self.cached = self._histogram("cached_tokens", "Prompt tokens found in a KV cache", _INPUT)
        self.images, self.videos, self.audio = (
            self._histogram(f"{kind}_per_request", f"Number of {part} content parts per request", _MEDIA)
            for kind, part in (("images", "image_url"), ("videos", "video_url"), ("audio", "audio_url"))
        )
        self.tokens = self._counter("output_tokens_total", "Generated tokens", "model")
        tokenize = self._histogram("tokenize_seconds", "Time to tokenize the prompts of a request", _TOKENIZE, ())
        template = self._histogram("template_seconds", "Time to render a chat", _TEMPLATE, ())
        self.tokenize_seconds, self.template_seconds = tokenize.child(), template.child()
        self.migrations = self._counter(
            "model_migration_total", "Failures of workers that others could make good", "migration_type", "model"
        )
        self.migration_duration = self._histogram(
            "model_migration_duration_seconds",
            "Time from a worker's failure to output of another, or to the failure of the request",
            _MIGRATION,
            ("migration_type", "model", "outcome"),
        )
        self._tokenizer_caches = TokenizerCacheCollector(prefix)
        registry.register(self._collector)
        registry.register(self._tokenizer_caches)

    def tokenizer_cache_of(self, model: str) -> CacheTally:
        """Counts what the tokenizer of a registered model finds in its cache, by its primary name."""
        return self._tokenizer_caches.tally_of(model)

    def migrations_of(self, model: str) -> ModelMigrations:
        """Counts migrations of a registered model, by its primary name."""
        return ModelMigrations(self, model)

    def model(self, name: str | None) -> ModelMetrics:
        """Children of a registered model's primary name; None: ``unknown_model``."""
        label = UNKNOWN_MODEL if name is None else name
        found = self._models.get(label)
        if found is None:
            found = self._models[label] = ModelMetrics(self, label)
        return found

    def forget(self, name: str) -> None:
        """Drop the gauges of a model that left; its counters and histograms stay until the process ends."""
        self._models.pop(name, None)
        for gauge in (self.active, self.inflight, self.queued):
            gauge.remove(name)

    def refused(self, endpoint: str) -> None:
        """Count a request that was over the concurrency bound."""
        self._refused.child(endpoint).value += 1

    def finished(self, endpoint: str, model: str, request_type: str, status: int, limit: str | None = None) -> None:
        """Count the end of a request; ``limit``: what one that was refused as too much ran into."""
        outcome = "success" if status < 400 else "error"
        self._finished.child(endpoint, error_type(status), model, request_type, outcome).value += 1
        if status == OVERLOADED:
            self._rejected.child(endpoint, model).value += 1
            self._failures.child(*_LIMITS.get(limit, _FAILURES[OVERLOADED])).value += 1
        elif status >= 400:
            self._failures.child(*_FAILURES.get(status, _FAILURES[400] if status < 500 else _INTERNAL)).value += 1

    def text(self) -> bytes:
        """The page for Prometheus: everything in the registry."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> CounterFamily:
        family = CounterFamily(f"{self._prefix}_{name}", text, labels)
        self._collector.add(family)
        return family

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeFamily:
        family = GaugeFamily(f"{self._prefix}_{name}", text, labels)
        self._collector.add(family)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ("model",)
    ) -> HistogramFamily:
        family = HistogramFamily(f"{self._prefix}_{name}", text, labels, bounds)
        self._collector.add(family)
        return family


_INTERNAL = ("Internal", "runtime.internal")


class ModelMetrics:
    """Children of one model label, resolved once."""

    __slots__ = (
        *("_families", "active", "audio", "between", "cached", "duration", "first", "images", "inflight", "input"),
        *("label", "output", "queued", "tokens", "videos"),
    )

    def __init__(self, families: FrontendMetrics, label: str) -> None:
        self._families = families
        self.label = label
        self.active = families.active.child(label)
        self.inflight = families.inflight.child(label)
        self.queued = families.queued.child(label)
        self.duration = families.duration.child(label)
        self.first = families.first.child(label)
        self.between = families.between.child(label)
        self.input = families.input.child(label)
        self.output = families.output.child(label)
        self.cached = families.cached.child(label)
        self.images = families.images.child(label)
        self.videos = families.videos.child(label)
        self.audio = families.audio.child(label)
        self.tokens = families.tokens.child(label)

    def started(self, endpoint: str, request_type: str) -> None:
        """Count a request that a handler took."""
        self._families.started.child(endpoint, self.label, request_type).value += 1

    def cancelled(self, endpoint: str, request_type: str) -> None:
        """Count a request whose client went away."""
        self._families.cancelled.child(endpoint, self.label, request_type).value += 1


class ModelMigrations:
    """A ``MigrationObserver`` for one model."""

    def __init__(self, families: FrontendMetrics, label: str) -> None:
        self._families = families
        self._label = label

    def worker_lost(self, kind: str) -> None:
        self._families.migrations.child(kind, self._label).value += 1

    def migrated(self, kind: str, seconds: float, *, recovered: bool) -> None:
        outcome = "success" if recovered else "failure"
        self._families.migration_duration.child(kind, self._label, outcome).observe(seconds)


class RequestMeter:
    """Measures one request from its first token on. ``now`` is monotonic seconds.

    ``open`` when the request goes to a worker, ``tokens`` for each arrival, ``close`` at the end, whatever the end is.
    """

    __slots__ = ("_arrival", "_model", "_open", "_start", "first_token_s", "generated")

    def __init__(self, model: ModelMetrics, start: float) -> None:
        self._model = model
        self._start = start
        self._arrival: float | None = None
        self._open = False
        self.generated = 0
        self.first_token_s: float | None = None

    def open(self, prompt_tokens: int, media: MediaCounts = NO_MEDIA) -> None:
        """The request goes to a worker."""
        model = self._model
        self._open = True
        model.inflight.value += 1
        model.queued.value += 1
        model.input.observe(prompt_tokens)
        model.images.observe(media.images)
        model.videos.observe(media.videos)
        model.audio.observe(media.audio)

    def tokens(self, now: float, count: int) -> None:
        """``count`` tokens arrived."""
        if count <= 0:
            return
        model = self._model
        self.generated += count
        model.tokens.value += count
        if self._arrival is None:
            model.queued.value -= 1
            self.first_token_s = now - self._start
            model.first.observe(self.first_token_s)
        else:
            model.between.observe((now - self._arrival) / count, count)
        self._arrival = now

    def close(self, now: float, cached_tokens: int | None) -> None:
        """The request is over."""
        model = self._model
        if self._open:
            self._open = False
            model.inflight.value -= 1
            if self._arrival is None:
                model.queued.value -= 1
            model.output.observe(self.generated)
            if cached_tokens is not None:
                model.cached.observe(cached_tokens)
        model.duration.observe(now - self._start)
