from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.frontend.chat_media import MediaCounts
from dynamo_es.frontend.metrics import FrontendMetrics, RequestMeter, error_type
from dynamo_es.frontend.tally import Distribution


def samples(metrics: FrontendMetrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_value_on_a_bound_belongs_to_it() -> None:
    distribution = Distribution((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        distribution.observe(value)
    distribution.observe(9, times=3)
    assert distribution.counts == [2, 2, 4]
    assert distribution.sum == 8 + 27


def test_page_has_cumulative_buckets() -> None:
    metrics = FrontendMetrics(CollectorRegistry(), "p")
    meter = RequestMeter(metrics.model("m"), 10.0)
    meter.open(150, MediaCounts(images=2))
    meter.tokens(10.003, 1)
    meter.tokens(10.203, 4)
    meter.close(11.0, 64)
    found = samples(metrics)
    assert found['p_time_to_first_token_seconds_bucket{le="0.0022",model="m"}'] == 0
    assert found['p_time_to_first_token_seconds_bucket{le="0.0047",model="m"}'] == 1
    assert found['p_inter_token_latency_seconds_count{model="m"}'] == 4
    assert found['p_inter_token_latency_seconds_bucket{le="0.064",model="m"}'] == 4
    assert found['p_input_sequence_tokens_bucket{le="+Inf",model="m"}'] == 1
    assert found['p_output_tokens_total{model="m"}'] == 5
    assert found['p_cached_tokens_sum{model="m"}'] == 64
    assert found['p_images_per_request_bucket{le="1.0",model="m"}'] == 0
    assert found['p_images_per_request_bucket{le="2.0",model="m"}'] == 1
    assert found['p_videos_per_request_bucket{le="0.0",model="m"}'] == 1
    assert found['p_audio_per_request_bucket{le="100.0",model="m"}'] == 1


def test_request_without_tokens_leaves_no_gauge_behind() -> None:
    metrics = FrontendMetrics(CollectorRegistry(), "p")
    meter = RequestMeter(metrics.model("m"), 0.0)
    meter.open(1)
    assert samples(metrics)['p_queued_requests{model="m"}'] == 1
    meter.close(1.0, None)
    found = samples(metrics)
    assert found['p_queued_requests{model="m"}'] == found['p_inflight_requests{model="m"}'] == 0


def test_second_frontend_in_a_registry_is_refused() -> None:
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        FrontendMetrics(registry)


@pytest.mark.parametrize(
    ("status", "label"),
    [
        (200, ""),
        (400, "validation"),
        (404, "not_found"),
        (413, "validation"),
        (499, "cancelled"),
        (460, "incomplete_body"),
        (500, "internal"),
        (501, "not_implemented"),
        (503, "unavailable"),
        (504, "internal"),
        (529, "overload"),
    ],
)
def test_error_types_are_a_closed_set(status: int, label: str) -> None:
    assert error_type(status) == label
