from __future__ import annotations

import uuid

import pytest

from tests.e2e.recording_suite import REQUESTS, predict_recording


@pytest.mark.kafka
@pytest.mark.parametrize("kill_after", [None, 17], ids=["undisturbed", "router-killed"])
async def test_predicted_cached_tokens_equal_those_of_vllm_on_kafka(tmp_path, kafka_bootstrap, kill_after):
    namespace = f"recording-{uuid.uuid4().hex[:8]}"
    url = f"kafka://{kafka_bootstrap}"
    results = await predict_recording(url, tmp_path, kill_after=kill_after, namespace=namespace)
    assert len(results) == REQUESTS == 33
    assert [predicted for predicted, _ in results] == [recorded for _, recorded in results]
