from __future__ import annotations

import pytest

from tests.e2e.recording_suite import REQUESTS, predict_recording


@pytest.mark.parametrize("kill_after", [None, 17], ids=["undisturbed", "router-killed"])
async def test_predicted_cached_tokens_equal_those_of_vllm(tmp_path, kill_after):
    results = await predict_recording(f"embedded://{tmp_path}/log", tmp_path, kill_after=kill_after)
    assert len(results) == REQUESTS == 33
    assert [predicted for predicted, _ in results] == [recorded for _, recorded in results]
