"""Recorded outputs, thoughts and measured times of the mock engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import MockConfig
from dynamo_es.engines.mock.config import MockEngineConfig, ReasoningOutput
from dynamo_es.engines.mock.engine import MockEngine
from dynamo_es.engines.mock.files import load_outputs, load_profile, read_arguments
from dynamo_es.engines.mock.output import read_outputs, with_thoughts
from dynamo_es.engines.mock.setup import make_args, stagger_s
from dynamo_es.errors import ConfigError, InvalidArgument
from tests.unit.engines.test_mock_engine import ask, frames_of

ROWS = [
    {"timestamp": 0, "request_id": "a", "output_token_ids": [1, 2, 3]},
    {"timestamp": 1, "session_id": "s", "output_token_ids": [4]},
    {"timestamp": 2, "session_id": "s"},
    {"timestamp": 3, "session_id": "s", "output_token_ids": [5, 6]},
    {"timestamp": 4, "output_token_ids": []},
]


def lines(*rows: Any) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def counting(request: Mapping[str, Any], choice: int) -> Iterator[int]:
    return count(100)


async def tokens_of(engine: MockEngine, max_tokens: int, *annotations: str) -> tuple[list[int], str]:
    frames = await frames_of(engine, ask(range(8), max_tokens, annotations=list(annotations)))
    return [token for frame in frames for token in frame["token_ids"]], frames[-1]["finish_reason"]


def test_rows_have_the_keys_of_the_reference() -> None:
    found = {key: list(tokens) for key, tokens in read_outputs(lines(*ROWS), "t").items()}
    assert found == {"a": [1, 2, 3], "s:0": [4], "s:2": [5, 6], "line:4": []}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (lines({"a": 1}), "has no row"),
        ([b"{"], "line 1: this is no JSON"),
        (lines([]), "line 1: expected an object"),
        (lines({"output_token_ids": "x"}), "each a u32"),
        (lines({"output_token_ids": [-1]}), "each a u32"),
        (lines(ROWS[0], ROWS[0]), "line 2: the key 'a' is there already"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(bad: list[bytes], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_outputs(bad, "t")


async def test_a_request_gets_the_row_that_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines(*ROWS)))
    config = MockEngineConfig(num_gpu_blocks=64, block_size=4, speedup_ratio=0, reasoning=ReasoningOutput(8, 9, 0.5))
    recorded = load_outputs(str(path))
    engine = MockEngine(config, clock=SystemClock(), output_tokens=counting, recorded=recorded)
    await engine.start()
    try:
        assert await tokens_of(engine, 9, "x", "output_replay_id:a") == ([1, 2, 3], "stop")
        assert await tokens_of(engine, 2, "output_replay_id:a") == ([1, 2], "length")
        assert await tokens_of(engine, 4) == ([8, 9, 100, 101], "length")
        with pytest.raises(InvalidArgument, match="no output with the output_replay_id 'b'"):
            await tokens_of(engine, 2, "output_replay_id:b")
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("max_tokens", "ratio", "expected"),
    [(1, 0.5, [100]), (2, 0.0, [8, 9]), (6, 0.5, [8, 100, 9, 101, 102, 103]), (4, 1.0, [8, 100, 101, 9])],
)
def test_thoughts_are_a_share_of_the_answer(max_tokens: int, ratio: float, expected: list[int]) -> None:
    text = with_thoughts(count(100), max_tokens, ReasoningOutput(8, 9, ratio))
    assert [next(text) for _ in range(max_tokens)] == expected


PROFILE = {
    "prefill_isl": [100, 200], "prefill_ttft_ms": [10.0, 30.0], "decode_active_kv_tokens": [0, 1000],
    "decode_context_length": [10, 20], "decode_itl": [[1.0, 2.0], [3.0, 4.0]],
}  # fmt: skip


def test_measured_times_run_straight_between_and_beyond_the_points(tmp_path: Path) -> None:
    path = tmp_path / "profile.npz"
    np.savez(path, **{name: np.array(values) for name, values in PROFILE.items()})
    timing = load_profile(str(path))
    assert timing.prefill_ms([0], [150]) == pytest.approx(20)
    assert timing.prefill_ms([0, 0], [150, 150]) == pytest.approx(50)
    assert (timing.prefill_ms([0], [10]), timing.prefill_ms([], []), timing.decode_ms(0, 0, 9)) == (0, 0, 0)
    assert timing.decode_ms(500, 50, 9) == pytest.approx(2)
    assert timing.decode_ms(2000, 100, 9) == pytest.approx(6)


@pytest.mark.parametrize("change", [{"decode_itl": [[1.0]]}, {"prefill_isl": [2, 1]}, {"prefill_ttft_ms": None}])
def test_a_bad_profile_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "profile.npz"
    np.savez(path, **{name: np.array(values) for name, values in (PROFILE | change).items() if values is not None})
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_profile(str(path))


def test_files_that_are_not_there_or_not_what_they_should_be(tmp_path: Path) -> None:
    missing, text = str(tmp_path / "no"), tmp_path / "text"
    text.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="Failed to open NPZ file"):
        load_profile(missing)
    with pytest.raises(ConfigError, match="no archive of NumPy arrays"):
        load_profile(str(text))
    with pytest.raises(ConfigError, match="--response-replay-trace-path"):
        load_outputs(missing)
    for path in (missing, str(text)):
        with pytest.raises(ConfigError, match="Failed to load mocker args from"):
            read_arguments(path)


def test_options_become_arguments_and_a_file_goes_before_them() -> None:
    mock = MockConfig(num_workers=2, zmq_kv_events_ports="7000,7100", worker_type="agg", sglang_schedule_policy="lpm")
    args = make_args(mock, None, 1)
    assert (args.block_size, args.zmq_kv_events_port, args.worker_type) == (16, 7100, "aggregated")
    text = '{"engine_type": "sglang", "sglang": {"page_size": 4}, "max_num_seqs": 9}'
    config = make_args(mock, text).engine_config()
    assert (config.engine_type, config.block_size, config.max_num_seqs) == ("sglang", 4, 9)
    assert make_args(mock, None).engine_config().sglang.schedule_policy == "lpm"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_workers": 2, "bootstrap_ports": "1"}, "--bootstrap-ports must have one port for each of the 2 workers"),
        ({"zmq_replay_ports": "1"}, "needs --zmq-kv-events-ports"),
        ({"kv_transfer_bandwidth": 1.0}, "needs --kv-bytes-per-token"),
        ({"block_size": 1}, "--block-size=1 .* at least 2"),
        ({"reasoning": "x"}, "reasoning"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_args(MockConfig(**options), None)


@pytest.mark.parametrize(("workers", "delay", "expected"), [(1, 0.5, 0.5), (32, -1, 0), (33, -1, 0.1), (129, -1, 0.2)])
def test_starts_are_staggered(workers: int, delay: float, expected: float) -> None:
    assert stagger_s(MockConfig(num_workers=workers, stagger_delay=delay)) == expected
