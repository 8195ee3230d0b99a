"""The options of ``dynamo-es worker attach``: a running OpenAI-compatible server as a worker."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_base_url, check_name, check_path

APIS = ("auto", "vllm", "sglang", "llamacpp", "openai")
INPUTS = ("auto", "tokens", "text")


def check_upstream(text: str) -> None:
    """The server's address."""
    check_base_url(text, "--upstream-api-key-file")


def check_zmq(text: str) -> None:
    """An address that a ZMQ socket connects to."""
    scheme, _, rest = text.partition("://")
    if scheme not in ("tcp", "ipc", "inproc") or not rest or "*" in rest:
        raise ValueError("expected an address to connect to, like tcp://127.0.0.1:5557")


@dataclass(frozen=True, slots=True)
class AttachConfig:
    """Which server, and how it is asked."""

    upstream: str = option(
        "", flag="--upstream", env="DYN_ES_UPSTREAM", check=check_upstream,
        help="Base URL of the running server (vllm serve, SGLang, llama.cpp, Ollama, any with OpenAI's API), with or "
        "without /v1 at its end.",
    )  # fmt: skip
    model: str | None = option(
        None, flag="--upstream-model", env="DYN_ES_UPSTREAM_MODEL", check=check_name,
        help="The model's name there; unset: the only one that it lists.",
    )  # fmt: skip
    api: str = option(
        "auto", flag="--upstream-api", env="DYN_ES_UPSTREAM_API", choices=APIS,
        help="How it takes token ids; auto finds out, openai takes text only.",
    )  # fmt: skip
    input: str = option(
        "auto", flag="--upstream-input", env="DYN_ES_UPSTREAM_INPUT", choices=INPUTS,
        help="Whether it gets token ids (then --model-path must name its model's files) or requests as clients wrote "
        "them; auto: tokens if --model-path is given and the server takes them.",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, flag="--upstream-api-key-file", env="DYN_ES_UPSTREAM_API_KEY_FILE", check=check_path,
        help="File with the key that the server wants as a bearer token, one line.",
    )  # fmt: skip
    ca_cert_path: str | None = option(
        None, flag="--upstream-ca-cert-path", env="DYN_ES_UPSTREAM_CA_CERT_PATH", check=check_path,
        help="Authorities of the server's certificate (PEM); unset: the system's.",
    )  # fmt: skip
    verify: bool = option(
        True, flag="--upstream-verify", env="DYN_ES_UPSTREAM_VERIFY",
        help="Check the server's certificate.",
    )  # fmt: skip
    kv_events: tuple[str, ...] = option(
        (), flag="--kv-events", env="DYN_ES_KV_EVENTS", check=check_zmq, many=True,
        help="Where its KV events are published (ZMQ), tcp://host:port; once for each data-parallel rank, in order.",
    )  # fmt: skip
    kv_events_replay: tuple[str, ...] = option(
        (), flag="--kv-events-replay", env="DYN_ES_KV_EVENTS_REPLAY", check=check_zmq, many=True,
        help="Their replay sockets, in the same order: what was published before, or was lost, is asked for there.",
    )  # fmt: skip
    kv_events_topic: str | None = option(
        None, flag="--kv-events-topic", env="DYN_ES_KV_EVENTS_TOPIC", check=check_name,
        help="Topic of the events; unset: all.",
    )  # fmt: skip
    kv_block_size: int | None = option(
        None, flag="--kv-block-size", env="DYN_ES_KV_BLOCK_SIZE", unit="tokens", minimum=1, maximum=1_048_576,
        help="Tokens a block of its KV cache; unset: as its metrics say.",
    )  # fmt: skip
    health_interval_s: float = option(
        2.0, flag="--upstream-health-interval", env="DYN_ES_UPSTREAM_HEALTH_INTERVAL", unit="s",
        minimum=0.05, maximum=3600,
        help="How often it is asked whether it is well; while it is not, the worker takes no requests.",
    )  # fmt: skip
    health_timeout_s: float = option(
        10.0, flag="--upstream-health-timeout", env="DYN_ES_UPSTREAM_HEALTH_TIMEOUT", unit="s",
        minimum=0.05, maximum=3600,
        help="How long it may take to answer that, or any other question that is no inference request.",
    )  # fmt: skip
    metrics_interval_s: float = option(
        1.0, flag="--upstream-metrics-interval", env="DYN_ES_UPSTREAM_METRICS_INTERVAL", unit="s",
        minimum=0, maximum=3600,
        help="How often its /metrics become load events; 0: never.",
    )  # fmt: skip
    connect_timeout_s: float = option(
        5.0, flag="--upstream-connect-timeout", env="DYN_ES_UPSTREAM_CONNECT_TIMEOUT", unit="s",
        minimum=0.05, maximum=3600,
        help="How long a connection to it may take.",
    )  # fmt: skip
    first_token_timeout_s: float = option(
        600.0, flag="--upstream-first-token-timeout", env="DYN_ES_UPSTREAM_FIRST_TOKEN_TIMEOUT", unit="s",
        minimum=0.05, maximum=86_400,
        help="How long it may take until the first output of a request; another worker can get the request then.",
    )  # fmt: skip
    token_timeout_s: float = option(
        120.0, flag="--upstream-token-timeout", env="DYN_ES_UPSTREAM_TOKEN_TIMEOUT", unit="s",
        minimum=0.05, maximum=86_400,
        help="How long it may send nothing of an output that has begun.",
    )  # fmt: skip
    max_requests: int = option(
        4096, flag="--upstream-max-requests", env="DYN_ES_UPSTREAM_MAX_REQUESTS", unit="requests",
        minimum=1, maximum=1_000_000,
        help="Requests that it gets at a time, a connection each; the next one is refused as overloaded.",
    )  # fmt: skip
