"""Options of ``dynamo-es worker mock`` from outside: a process with most of them, and a recorded output over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.served_fleet import COMPLETIONS, served_fleet

TEXT = "recorded"


async def test_a_recorded_output_is_asked_for_over_http(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # The built-in tokenizer's ids are bytes.
    trace.write_text(json.dumps({"request_id": "a", "output_token_ids": list(TEXT.encode())}))
    async with served_fleet() as fleet:
        await fleet.mock_worker(response_replay_trace_path=str(trace), engine_type="trtllm")
        asked = {"prompt": "x", "max_tokens": 50}
        reply = await fleet.ask(COMPLETIONS, **asked, nvext={"annotations": ["output_replay_id:a"]})
        choice = reply.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
        unknown = await fleet.ask(COMPLETIONS, **asked, nvext={"annotations": ["output_replay_id:b"]})
        assert unknown.status == 400


@pytest.fixture
async def fleet(tmp_path: Path):
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    yield fleet
    await fleet.close()


async def test_a_process_takes_the_flags_of_dynamos_mocker(fleet: Fleet) -> None:
    extra = fleet.folder / "extra.json"
    extra.write_text('{"max_num_seqs": 9}')
    worker = await fleet.start(
        "worker", "worker", "mock", "--num-workers", "2", "--engine-type", "sglang", "--sglang-page-size", "4",
        "--sglang-schedule-policy", "lpm", "--sglang-max-prefill-tokens", "512", "--sglang-chunked-prefill-size", "64",
        "--sglang-clip-max-new-tokens", "100", "--sglang-schedule-conservativeness", "0.5",
        "--no-enable-chunked-prefill", "--disaggregation-mode", "prefill", "--bootstrap-ports", "0,0",
        "--zmq-kv-events-ports", "0,0", "--zmq-replay-ports", "0,0",
        "--kv-transfer-bandwidth", "64", "--kv-bytes-per-token", "1000",
        "--decode-speedup-ratio", "2", "--startup-time", "0.01", "--stagger-delay", "0.01", "--max-model-len", "512",
        "--extra-engine-args", str(extra), "--data-parallel-size", "2",
    )  # fmt: skip
    await worker.wait_ready(60)
    await worker.wait_ready(60)
    assert worker.log().count("KV events at") == 2
    assert await worker.end() == 0


async def test_flags_that_do_not_fit_end_the_start_with_the_reason(fleet: Fleet) -> None:
    worker = await fleet.start("worker", "worker", "mock", "--num-workers", "2", "--bootstrap-ports", "7000")
    assert await worker.process.wait() != 0
    assert "--bootstrap-ports must have one port for each of the 2 workers, it has 1" in worker.log()
