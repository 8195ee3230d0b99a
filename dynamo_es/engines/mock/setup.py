"""From the options of the command line to a mock engine's arguments. Pure."""

from __future__ import annotations

from dynamo_es.config.tree import MockConfig
from dynamo_es.engines.mock.args import MockEngineArgs, SglangArgs, TrtllmArgs, arguments_of_json, parse_reasoning
from dynamo_es.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16
MIN_BLOCK_SIZE = 2
"""Of all schedulers but SGLang's."""
_AS_THEY_ARE = (
    "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "speedup_ratio", "engine_type", "max_model_len",
    "enable_prefix_caching", "enable_chunked_prefill", "preemption_mode", "decode_speedup_ratio", "startup_time",
    "planner_profile_data", "response_replay_trace_path", "kv_transfer_bandwidth", "kv_bytes_per_token",
    "kv_transfer_timing_mode", "handoff_session_timeout_ms",
)  # fmt: skip
_SGLANG = (
    "schedule_policy", "max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens", "schedule_conservativeness"
)  # fmt: skip
# Beyond so many workers in one process an automatic stagger begins, and doubles.
_STAGGERED_WORKERS, _MANY_WORKERS = 33, 128
_STAGGER_S = 0.1


def make_args(mock: MockConfig, extra_json: str | None, number: int = 0) -> MockEngineArgs:
    """Arguments of one worker.

    Args:
        mock: The options.
        extra_json: Text of the file with further arguments, which go before them.
        number: The worker's place in its process, for its ports.

    Raises:
        ConfigError: A value is refused, or there are not as many ports as workers.
    """
    values = {name: getattr(mock, name) for name in _AS_THEY_ARE}
    values["block_size"] = mock.block_size or DEFAULT_BLOCK_SIZE
    values["dp_size"] = mock.data_parallel_size
    values["worker_type"] = "aggregated" if mock.worker_type == "agg" else mock.worker_type
    values["sglang"] = SglangArgs(**{name: getattr(mock, f"sglang_{name}") for name in _SGLANG})
    values["trtllm"] = TrtllmArgs(mock.trtllm_capacity_scheduler_policy)
    if mock.reasoning is not None:
        values["reasoning"] = parse_reasoning(mock.reasoning)
    if mock.zmq_replay_ports is not None and mock.zmq_kv_events_ports is None:
        raise ConfigError("--zmq-replay-ports needs --zmq-kv-events-ports")
    for name in ("zmq_kv_events", "zmq_replay", "bootstrap"):
        values[f"{name}_port"] = _port(mock, f"{name}_ports", number)
    if extra_json is not None:
        extra = arguments_of_json(extra_json)
        sglang = extra.get("sglang")
        if "block_size" not in extra and sglang is not None and sglang.page_size is not None:
            extra["block_size"] = 0
        values |= extra
    if values["kv_transfer_bandwidth"] and values["kv_bytes_per_token"] is None:
        raise ConfigError("--kv-transfer-bandwidth needs --kv-bytes-per-token")
    is_own = mock.block_size is not None and values["block_size"] == mock.block_size
    if is_own and values["block_size"] < MIN_BLOCK_SIZE and values["engine_type"] != "sglang":
        raise ConfigError(
            f"--block-size={mock.block_size} (DYN_ES_MOCK_BLOCK_SIZE): must be at least {MIN_BLOCK_SIZE}; "
            "only --engine-type sglang takes pages of one token"
        )
    try:
        return MockEngineArgs(**values)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"mock engine: {error}") from error


def stagger_s(mock: MockConfig) -> float:
    """Seconds between the starts of two workers."""
    if mock.stagger_delay >= 0:
        return mock.stagger_delay
    if mock.num_workers < _STAGGERED_WORKERS:
        return 0.0
    return _STAGGER_S if mock.num_workers <= _MANY_WORKERS else 2 * _STAGGER_S


def _port(mock: MockConfig, name: str, number: int) -> int | None:
    text = getattr(mock, name)
    if text is None:
        return None
    ports = [int(part) for part in text.split(",")]
    if len(ports) != mock.num_workers:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} must have one port for each of the {mock.num_workers} workers, it has {len(ports)}")
    return ports[number]
