"""Opens the traces of a process, if its options ask for them; OpenTelemetry is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.frontend.extras import import_extra

if TYPE_CHECKING:
    from dynamo_es.telemetry.otel import OtelTracing

EXTRA = "otel"
_TRACES_PATH = "/v1/traces"


def open_tracing(config: TelemetryConfig, *, role: str, instance_id: int) -> OtelTracing | None:
    """The traces of this process, which ``close`` ends; None: there are none.

    Args:
        config: Options.
        role: Of the process, for its spans.
        instance_id: Tells it from its like.

    Raises:
        MissingExtra: The library is not installed.
    """
    if not config.enabled:
        return None
    import_extra("opentelemetry.exporter.otlp.proto.http.trace_exporter", EXTRA, "to leave --otel-export out")
    from dynamo_es.telemetry.otel import OtelTracing

    return OtelTracing(config, endpoint_of(config.endpoint), role=role, instance_id=instance_id)


def endpoint_of(url: str | None) -> str | None:
    """The URL that traces are sent to; None: the library finds it in the environment."""
    if url is None or urlsplit(url).path.strip("/"):
        return url
    return url.rstrip("/") + _TRACES_PATH
