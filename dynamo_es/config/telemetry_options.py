"""Options of traces, under the names that OpenTelemetry and Dynamo have for them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_name, check_web_url


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """OpenTelemetry traces. What else the exporter knows it reads from OpenTelemetry's own variables: headers
    (``OTEL_EXPORTER_OTLP_HEADERS``), certificates, compression, ``OTEL_RESOURCE_ATTRIBUTES``.
    """

    enabled: bool = option(
        False, flag="--otel-export", env="OTEL_EXPORT_ENABLED",
        help="Export a trace of each inference request; needs the extra otel.",
    )  # fmt: skip
    endpoint: str | None = option(
        None, flag="--otel-traces-endpoint", env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", check=check_web_url,
        help="OTLP over HTTP: where the collector takes traces; without a path, /v1/traces. Unset: "
        "OTEL_EXPORTER_OTLP_ENDPOINT with that path, or http://localhost:4318/v1/traces.",
    )  # fmt: skip
    protocol: str = option(
        "http/protobuf", flag="--otel-traces-protocol", env="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        choices=("http/protobuf",), planned=("grpc", "http/json"),
        help="How traces are sent.",
    )  # fmt: skip
    service_name: str = option(
        "dynamo", flag="--otel-service-name", env="OTEL_SERVICE_NAME", check=check_name,
        help="What traces call this process.",
    )  # fmt: skip
    sample_ratio: float = option(
        1.0, flag="--otel-sample-ratio", env="OTEL_TRACES_SAMPLE_RATIO", minimum=0, maximum=1,
        help="Part of the traces that is recorded, of those that begin here; others are if their traceparent says so.",
    )  # fmt: skip
    queue: int = option(
        8192, flag="--otel-queue", env="OTEL_BSP_MAX_QUEUE_SIZE", unit="spans", minimum=1, maximum=10_000_000,
        help="Spans that may wait for the collector; what does not fit is dropped and counted, and no request waits.",
    )  # fmt: skip
