"""The options of the cross-datacentre relay (``dynamo-es relay``); names are Dynamo's where it has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import (
    check_host,
    check_log_url,
    check_name,
    check_namespace,
    check_path,
    check_topic_namespace,
)
from dynamo_es.errors import ConfigError
from dynamo_es.services.dc_relay.settings import MAX_SNAPSHOT_INTERVAL_S, RelaySettings
from schemas.dc_relay import DC_RELAY

_DAY_MS = 86_400_000
_SOURCE = re.compile(r"(?:(?P<namespace>[^=:/]+)=)?(?P<url>.+)")
_TOKENS = re.compile(r"\s*\d{1,10}(\s*,\s*\d{1,10})*\s*")


def check_dc_id(text: str) -> None:
    """Text without spaces around it, of at most 256 bytes."""
    try:
        RelaySettings(text).check()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def values_of(text: str) -> tuple[str, ...]:
    """Values joined by commas.

    Raises:
        ValueError: One is empty, or comes twice.
    """
    values = tuple(value.strip() for value in text.split(","))
    if not all(values):
        raise ValueError("expected values joined by commas, none of them empty")
    if len(set(values)) < len(values):
        raise ValueError("one value comes twice")
    return values


def check_namespaces(text: str) -> None:
    """Namespaces joined by commas."""
    for name in values_of(text):
        check_namespace(name)


def check_prefixes(text: str) -> None:
    """Endpoint prefixes joined by commas."""
    values_of(text)


def source_of(text: str) -> tuple[str | None, str]:
    """Topic namespace, if one is named, and log URL of ``[namespace=]url``.

    Raises:
        ValueError: It is none.
    """
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise ValueError("expected [namespace=]url")
    namespace, url = found["namespace"], found["url"]
    if namespace is not None:
        check_topic_namespace(namespace)
    check_log_url(url)
    return namespace, url


def check_source(text: str) -> None:
    """See ``source_of``."""
    source_of(text)


def check_tokens(text: str) -> None:
    """Token ids joined by commas."""
    if not _TOKENS.fullmatch(text) or any(int(token) >= 2**32 for token in text.split(",")):
        raise ValueError("expected token ids joined by commas, each below 4294967296")


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The relay of a data centre."""

    dc_id: str | None = option(
        None, flag="--dc-id", env="DYN_DC_ID", check=check_dc_id,
        help="Name of the data centre, the same over restarts; needed.",
    )  # fmt: skip
    namespaces: str | None = option(
        None, flag="--namespaces", env="DYN_RELAY_NAMESPACES", check=check_namespaces,
        help="Namespaces whose endpoints are watched, joined by commas; unset: all.",
    )  # fmt: skip
    namespace_filter: str | None = option(
        None, flag="--namespace-filter", env="DYN_RELAY_NAMESPACE_FILTER", check=check_namespace,
        help="An earlier name of --namespaces, for one namespace.",
    )  # fmt: skip
    watch_all: bool = option(
        False, flag="--watch-all", env="DYN_RELAY_WATCH_ALL",
        help="Watch endpoints of all namespaces, as without any of these options.",
    )  # fmt: skip
    endpoint_prefixes: tuple[str, ...] = option(
        (), flag="--endpoint-prefix", env="DYN_RELAY_ENDPOINT_PREFIXES", check=check_prefixes, many=True,
        help="Watch only endpoints that begin with these parts: namespace[.component[.endpoint]]; may be repeated, or "
        "joined by commas.",
    )  # fmt: skip
    expected_unique_blocks: int = option(
        1_048_576, flag="--expected-unique-blocks", env="DYN_RELAY_EXPECTED_UNIQUE_BLOCKS", unit="blocks",
        minimum=1, maximum=2**40,
        help="Blocks that a pool is expected to hold: of more changes at once no list is kept, the pool is compared as "
        "a whole; a larger pool is told in a warning. No limit.",
    )  # fmt: skip
    publication_threshold: int = option(
        16, flag="--publication-threshold", env="DYN_RELAY_PUBLICATION_THRESHOLD", unit="blocks",
        minimum=1, maximum=2**40, help="Changed blocks that are published at once.",
    )  # fmt: skip
    publication_delay_ms: int = option(
        1, flag="--publication-delay-ms", env="DYN_RELAY_PUBLICATION_DELAY_MS", unit="ms",
        minimum=1, maximum=_DAY_MS, help="How long fewer changed blocks wait for more.",
    )  # fmt: skip
    recovery_attempt_timeout_ms: int = option(
        30_000, flag="--recovery-attempt-timeout-ms", env="DYN_RELAY_RECOVERY_ATTEMPT_TIMEOUT_MS", unit="ms",
        minimum=1, maximum=_DAY_MS,
        help="How long a worker whose events are missing may take to announce its blocks anew; then it is fenced (left "
        "out, and counted), and asked again.",
    )  # fmt: skip
    load_window_ms: int = option(
        1_000, flag="--load-window-ms", env="DYN_RELAY_LOAD_WINDOW_MS", unit="ms", minimum=10, maximum=60_000,
        help="Time from one status (load, readiness, pools) to the next.",
    )  # fmt: skip
    snapshot_interval_s: float = option(
        300.0, flag="--relay-snapshot-interval", env="DYN_ES_RELAY_SNAPSHOT_INTERVAL", unit="s",
        minimum=0.05, maximum=MAX_SNAPSHOT_INTERVAL_S,
        help="Time from one snapshot of a pool's blocks to the next: readers that come late begin with one.",
    )  # fmt: skip
    namespace: str = option(
        "dynamo", flag="--relay-namespace", env="DYN_NAMESPACE", check=check_namespace,
        help="Namespace of the relay's own endpoint kv_dc_relay_<hash of the data centre's name>.health.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayViewConfig:
    """A view over the relays of several data centres."""

    sources: tuple[str, ...] = option(
        (), flag="--relay-source", env="DYN_ES_RELAY_SOURCES", check=check_source, many=True,
        help=f"A log with a topic {DC_RELAY.name}: [topic namespace=]log URL; may be repeated; unset: --log with "
        "--topic-namespace.",
    )  # fmt: skip
    stale_after_s: float = option(
        15.0, flag="--relay-stale-after", env="DYN_ES_RELAY_STALE_AFTER", unit="s", minimum=0.1, maximum=86_400,
        help="A data centre that was not heard of for longer is ranked behind all others.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayServeConfig:
    """The view over HTTP (``dynamo-es relay serve``)."""

    host: str = option(
        "127.0.0.1", flag="--relay-host", env="DYN_ES_RELAY_HOST", check=check_host,
        help="Address that it listens on; there are no keys: put it behind what guards your network.",
    )  # fmt: skip
    port: int = option(
        8093, flag="--relay-port", env="DYN_ES_RELAY_PORT", minimum=0, maximum=65_535,
        help="Port; 0 takes a free one.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayQueryConfig:
    """``dynamo-es relay query``."""

    model: str | None = option(
        None, flag="--model", env=None, check=check_name, help="Model, alias or LoRA adapter that is asked for; needed."
    )
    token_ids: str | None = option(
        None, flag="--token-ids", env=None, check=check_tokens, help="Token ids of the prompt, joined by commas."
    )
    token_ids_file: str | None = option(
        None, flag="--token-ids-file", env=None, check=check_path,
        help="A file that has them as a JSON list, for long prompts; - is standard input.",
    )  # fmt: skip
    lora_name: str | None = option(
        None, flag="--lora-name", env=None, check=check_name, help="LoRA adapter, where --model names its base model."
    )
    cache_salt: str | None = option(
        None, flag="--cache-salt", env=None, check=check_name, help="Cache salt of the prompt."
    )
    timeout_s: float = option(
        30.0, flag="--timeout", env=None, unit="s", minimum=0.1, maximum=3600,
        help="How long reading the topics may take; then the answer rests on what was read.",
    )  # fmt: skip
