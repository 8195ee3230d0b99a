"""The options of the mock engine: the flags of Dynamo's mocker."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_model_type, check_path

_MAX_PORT = 65_535


def check_ports(text: str) -> None:
    """Ports joined by commas."""
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) > _MAX_PORT:
            raise ValueError(f"expected ports of 0 to {_MAX_PORT} joined by commas")


@dataclass(frozen=True, slots=True)
class MockConfig:
    """The mock engine; names are Dynamo's (spec of its ``MockEngineArgs``)."""

    num_workers: int = option(
        1, flag="--num-workers", env="DYN_ES_MOCK_NUM_WORKERS", unit="workers", minimum=1, maximum=10_000,
        help="Workers in this process, each registered for itself; they share its log, its bounds and its connections.",
    )  # fmt: skip
    num_gpu_blocks: int = option(
        16_384, flag="--num-gpu-blocks-override", env="DYN_ES_MOCK_NUM_GPU_BLOCKS", unit="blocks",
        minimum=1, maximum=100_000_000,
        help="Size of the KV cache of each rank.",
    )  # fmt: skip
    block_size: int | None = option(
        None, flag="--block-size", env="DYN_ES_MOCK_BLOCK_SIZE", unit="tokens", minimum=1, maximum=1_048_576,
        aliases=("--sglang-page-size",),
        help="Tokens a block (SGLang's page); at least 2, but for SGLang. Unset: 16.",
    )  # fmt: skip
    max_num_seqs: int = option(
        256, flag="--max-num-seqs", env="DYN_ES_MOCK_MAX_NUM_SEQS", unit="requests", minimum=1, maximum=1_000_000,
        help="Requests that run at a time.",
    )  # fmt: skip
    max_num_batched_tokens: int = option(
        8192, flag="--max-num-batched-tokens", env="DYN_ES_MOCK_MAX_NUM_BATCHED_TOKENS", unit="tokens",
        minimum=1, maximum=100_000_000,
        help="Tokens that one pass computes at most.",
    )  # fmt: skip
    speedup_ratio: float = option(
        1.0, flag="--speedup-ratio", env="DYN_ES_MOCK_SPEEDUP_RATIO", minimum=0, maximum=1_000_000,
        help="Divides the simulated time; 0 takes none at all.",
    )  # fmt: skip
    default_max_tokens: int = option(
        256, flag="--default-max-tokens", env="DYN_ES_MOCK_DEFAULT_MAX_TOKENS", unit="tokens",
        minimum=1, maximum=10_000_000,
        help="Length of an answer to a request that does not say how much it wants.",
    )  # fmt: skip
    worker_type: str = option(
        "aggregated", flag="--worker-type", env="DYN_ES_MOCK_WORKER_TYPE", aliases=("--disaggregation-mode",),
        choices=("aggregated", "agg", "prefill", "decode"),
        help="Whether it computes prompts and generates, computes prompts for others, or generates for their prompts.",
    )  # fmt: skip
    model_type: str = option(
        "Chat,Completions", flag="--model-type", env="DYN_ES_MOCK_MODEL_TYPE", check=check_model_type,
        help="What it serves: one or more of Chat, Completions and Embedding. Vectors of embeddings are made up; the "
        "same text has the same one.",
    )  # fmt: skip
    embedding_dimensions: int = option(
        384, flag="--embedding-dimensions", env="DYN_ES_MOCK_EMBEDDING_DIMENSIONS", minimum=1, maximum=65_536,
        help="Numbers in a vector.",
    )  # fmt: skip
    data_parallel_size: int = option(
        1, flag="--data-parallel-size", env="DYN_ES_MOCK_DATA_PARALLEL_SIZE", unit="ranks", minimum=1, maximum=1024,
        help="Data-parallel ranks of each worker.",
    )  # fmt: skip
    engine_type: str = option(
        "vllm", flag="--engine-type", env="DYN_ES_MOCK_ENGINE_TYPE", choices=("vllm", "sglang", "trtllm"),
        help="Whose scheduler and KV events are mimicked.",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, flag="--max-model-len", env="DYN_ES_MOCK_MAX_MODEL_LEN", unit="tokens", minimum=1, maximum=100_000_000,
        help="Longest prompt with its answer; unset: the model's context.",
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, flag="--enable-prefix-caching", env="DYN_ES_MOCK_ENABLE_PREFIX_CACHING",
        help="Reuse blocks of earlier requests, and tell routers of them.",
    )  # fmt: skip
    enable_chunked_prefill: bool = option(
        True, flag="--enable-chunked-prefill", env="DYN_ES_MOCK_ENABLE_CHUNKED_PREFILL",
        help="Spread a prompt over passes.",
    )  # fmt: skip
    preemption_mode: str = option(
        "lifo", flag="--preemption-mode", env="DYN_ES_MOCK_PREEMPTION_MODE", choices=("lifo", "fifo"),
        help="Who gives way when blocks run out: the newest running request, or the oldest. SGLang has its own rule.",
    )  # fmt: skip
    decode_speedup_ratio: float = option(
        1.0, flag="--decode-speedup-ratio", env="DYN_ES_MOCK_DECODE_SPEEDUP_RATIO", minimum=0, maximum=1_000_000,
        help="Divides the time of decoding further, as speculative decoding would; 0: it takes none.",
    )  # fmt: skip
    startup_time: float | None = option(
        None, flag="--startup-time", env="DYN_ES_MOCK_STARTUP_TIME", unit="s", minimum=0, maximum=86_400,
        help="How long a worker takes to start before it registers.",
    )  # fmt: skip
    stagger_delay: float = option(
        0.0, flag="--stagger-delay", env="DYN_ES_MOCK_STAGGER_DELAY", unit="s", minimum=-1, maximum=3_600,
        help="Time between the starts of two workers of this process; -1: 0.1 s for 33 to 128 workers, 0.2 s above.",
    )  # fmt: skip
    planner_profile_data: str | None = option(
        None, flag="--planner-profile-data", env="DYN_ES_MOCK_PLANNER_PROFILE_DATA", check=check_path,
        help="Measured times of a real engine (NumPy archive: prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, "
        "decode_context_length, decode_itl) in place of Dynamo's polynomials.",
    )  # fmt: skip
    reasoning: str | None = option(
        None, flag="--reasoning", env="DYN_ES_MOCK_REASONING",
        help="Thoughts in every answer, as JSON: start_thinking_token_id, end_thinking_token_id, thinking_ratio.",
    )  # fmt: skip
    response_replay_trace_path: str | None = option(
        None, flag="--response-replay-trace-path", env="DYN_ES_MOCK_RESPONSE_REPLAY_TRACE_PATH", check=check_path,
        help="Mooncake trace (JSON lines) with output_token_ids; a request with the annotation output_replay_id:KEY "
        "gets that row's output.",
    )  # fmt: skip
    sglang_schedule_policy: str | None = option(
        None, flag="--sglang-schedule-policy", env="DYN_ES_MOCK_SGLANG_SCHEDULE_POLICY",
        choices=("fifo", "fcfs", "lpm"),
        help="Who comes first: who came first (unset), or who has the longest prefix cached.",
    )  # fmt: skip
    sglang_max_prefill_tokens: int | None = option(
        None, flag="--sglang-max-prefill-tokens", env="DYN_ES_MOCK_SGLANG_MAX_PREFILL_TOKENS", unit="tokens",
        minimum=1, maximum=100_000_000,
        help="Prompt tokens of one pass of SGLang; unset: 16384.",
    )  # fmt: skip
    sglang_chunked_prefill_size: int | None = option(
        None, flag="--sglang-chunked-prefill-size", env="DYN_ES_MOCK_SGLANG_CHUNKED_PREFILL_SIZE", unit="tokens",
        minimum=1, maximum=100_000_000,
        help="Part of a prompt that one pass of SGLang computes; unset: 8192.",
    )  # fmt: skip
    sglang_clip_max_new_tokens: int | None = option(
        None, flag="--sglang-clip-max-new-tokens", env="DYN_ES_MOCK_SGLANG_CLIP_MAX_NEW_TOKENS", unit="tokens",
        minimum=1, maximum=100_000_000,
        help="Output that SGLang reckons with at most when it lets a request in; unset: 4096.",
    )  # fmt: skip
    sglang_schedule_conservativeness: float | None = option(
        None, flag="--sglang-schedule-conservativeness", env="DYN_ES_MOCK_SGLANG_SCHEDULE_CONSERVATIVENESS",
        minimum=0, maximum=100,
        help="How much room SGLang keeps free for what running requests may still generate; unset: 1.",
    )  # fmt: skip
    trtllm_capacity_scheduler_policy: str | None = option(
        None, flag="--trtllm-capacity-scheduler-policy", env="DYN_ES_MOCK_TRTLLM_CAPACITY_SCHEDULER_POLICY",
        choices=("guaranteed_no_evict",),
        help="TensorRT-LLM's policy; there is the one.",
    )  # fmt: skip
    zmq_kv_events_ports: str | None = option(
        None, flag="--zmq-kv-events-ports", env="DYN_ES_MOCK_ZMQ_KV_EVENTS_PORTS", check=check_ports,
        help="Ports joined by commas, one a worker, where KV events are told as the mimicked engine does, beside the "
        "log; rank N listens on its worker's port + N, 0 takes free ones.",
    )  # fmt: skip
    zmq_replay_ports: str | None = option(
        None, flag="--zmq-replay-ports", env="DYN_ES_MOCK_ZMQ_REPLAY_PORTS", check=check_ports,
        help="The same for the sockets that repeat the last 10,000 messages of --zmq-kv-events-ports.",
    )  # fmt: skip
    kv_transfer_bandwidth: float | None = option(
        None, flag="--kv-transfer-bandwidth", env="DYN_ES_MOCK_KV_TRANSFER_BANDWIDTH", unit="GB/s",
        minimum=0, maximum=1_000_000,
        help="How fast a decode worker gets the KV cache of a prompt; 0 or unset: at once. Needs --kv-bytes-per-token.",
    )  # fmt: skip
    kv_bytes_per_token: int | None = option(
        None, flag="--kv-bytes-per-token", env="DYN_ES_MOCK_KV_BYTES_PER_TOKEN", unit="bytes",
        minimum=0, maximum=1_000_000_000,
        help="Size of the KV cache of one token, for --kv-transfer-bandwidth.",
    )  # fmt: skip
    kv_transfer_timing_mode: str = option(
        "full_prompt", flag="--kv-transfer-timing-mode", env="DYN_ES_MOCK_KV_TRANSFER_TIMING_MODE",
        choices=("full_prompt", "destination_missing"),
        help="What is transferred: the whole prompt, or what the decode worker has not cached.",
    )  # fmt: skip
    bootstrap_ports: str | None = option(
        None, flag="--bootstrap-ports", env="DYN_ES_MOCK_BOOTSTRAP_PORTS", check=check_ports,
        help="Ports joined by commas, one a worker, where decode workers meet a prefill worker; 0 takes a free one. "
        "Unset: prompts are handed over with the prefill worker's answer.",
    )  # fmt: skip
    handoff_session_timeout_ms: int = option(
        300_000, flag="--handoff-session-timeout-ms", env="DYN_ES_MOCK_HANDOFF_SESSION_TIMEOUT_MS", unit="ms",
        minimum=1, maximum=86_400_000,
        help="How long the two sides of a hand-over at a bootstrap port wait for each other.",
    )  # fmt: skip
    extra_engine_args: str | None = option(
        None, flag="--extra-engine-args", env="DYN_ES_MOCK_EXTRA_ENGINE_ARGS", check=check_path,
        help="JSON file with arguments by the names of Dynamo's MockEngineArgs; they go before the options here.",
    )  # fmt: skip
