"""``dynamo-es relay``: tell other data centres what this one's KV caches hold, and ask what theirs do."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_es.cli.allocator import bound_free_memory
from dynamo_es.cli.process import (
    announce_ready,
    check_log,
    check_log_exists,
    load_process,
    run_async,
    serve_process,
    set_up_logging,
    stop_on_signals,
)
from dynamo_es.clock import SystemClock
from dynamo_es.config.command_options import ToolLoggingConfig
from dynamo_es.config.options import add_flags, load, origins
from dynamo_es.config.relay_options import (
    RelayConfig,
    RelayQueryConfig,
    RelayServeConfig,
    RelayViewConfig,
    source_of,
    values_of,
)
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import LogConfig, LoggingConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.log.open import open_log
from dynamo_es.services.dc_relay.settings import RelayScope, RelaySettings

if TYPE_CHECKING:
    from dynamo_es.services.dc_relay.global_view import GlobalKvView
    from dynamo_es.services.dc_relay.ranking import PromptQuery

_MAX_TOKENS_BYTES = 64 * 1024 * 1024
# Topics that cannot be read by then are waited for while it serves.
_START_S = 10.0
_SCOPES = ("namespaces", "namespace_filter", "watch_all")


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("relay", help="KV caches of several data centres: tell, and ask which holds a prompt")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    config: type
    run = actions.add_parser("run", help="tell other data centres what this one's KV caches hold")
    for config in (
        RelayConfig, LogConfig, StateConfig, RuntimeConfig, SystemConfig, TelemetryConfig, LoggingConfig,
    ):  # fmt: skip
        add_flags(run, config)
    run.set_defaults(run=_run)
    query = actions.add_parser("query", help="print which data centre holds most of a prompt")
    for config in (RelayQueryConfig, RelayViewConfig, LogConfig, ToolLoggingConfig):
        add_flags(query, config)
    query.set_defaults(run=_query)
    serve = actions.add_parser("serve", help="answer the same question over HTTP")
    for config in (RelayServeConfig, RelayViewConfig, LogConfig, LoggingConfig):
        add_flags(serve, config)
    serve.set_defaults(run=_serve)


def relay_settings(config: RelayConfig, flags: argparse.Namespace | None, env: Mapping[str, str]) -> RelaySettings:
    """What the options come to.

    Raises:
        ConfigError: They contradict each other, or one that is needed is missing.
    """
    if config.dc_id is None:
        raise ConfigError("--dc-id or DYN_DC_ID is needed: the name of this data centre")
    # What the command line says about namespaces replaces what the environment says, as in Dynamo.
    sources = origins(RelayConfig, flags, env)
    given = [name for name in _SCOPES if sources[name] != "default" and getattr(config, name)]
    from_flags = [name for name in given if sources[name].startswith("--")]
    given = from_flags or given
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(sources[name] for name in given)} exclude each other")
    namespaces: Sequence[str] | None = None
    if "namespaces" in given:
        namespaces = values_of(config.namespaces or "")
    elif "namespace_filter" in given:
        namespaces = (config.namespace_filter or "",)
    prefixes = tuple(prefix for part in config.endpoint_prefixes for prefix in values_of(part))
    settings = RelaySettings(
        config.dc_id, RelayScope(namespaces, prefixes), config.publication_threshold, config.publication_delay_ms,
        config.recovery_attempt_timeout_ms, config.expected_unique_blocks, config.load_window_ms,
        config.snapshot_interval_s,
    )  # fmt: skip
    settings.check()
    return settings


def _run(flags: argparse.Namespace) -> int:
    """Relay until SIGINT or SIGTERM."""
    from dynamo_es.services.dc_relay.process import RelayProcessSettings, run_relay

    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "tool")
    config = load(RelayConfig, flags, env)
    settings = RelayProcessSettings(process, relay_settings(config, flags, env), config.namespace)
    bound_free_memory(env)

    async def relay(stop: asyncio.Event) -> None:
        def on_ready(path: str) -> None:
            announce_ready(path)

        await run_relay(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)

    serve_process(process, logging_config, relay)
    return 0


def _query(flags: argparse.Namespace) -> int:
    """Read the topics, print the answer; exit code 1 if no data centre has the model."""
    from dynamo_es.services.dc_relay.ranking import PromptQuery

    env = os.environ
    config = load(RelayQueryConfig, flags, env)
    logging_config = load(ToolLoggingConfig, flags, env)
    view_config, log_config = load(RelayViewConfig, flags, env), load(LogConfig, flags, env)
    if config.model is None:
        raise ConfigError("--model is needed: the model that the prompt is for")
    query = PromptQuery(config.model, _tokens(config), config.lora_name, config.cache_salt)
    check_sources(view_config, log_config)
    set_up_logging(logging_config)
    answer = run_async(_ask(query, view_config, log_config, config.timeout_s))
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    return 0 if answer["candidates"] else 1


async def _ask(
    query: PromptQuery, config: RelayViewConfig, log_config: LogConfig, timeout_s: float
) -> dict[str, list[dict[str, Any]]]:
    view = build_view(config, log_config)
    try:
        await view.start(timeout_s)
        if view.dead:
            raise DynamoException(str(view.dead[0]))
        if not view.states:
            reasons = "; ".join(f"{topic['topic']}: {topic['reason'] or 'no answer'}" for topic in view.topics())
            raise DynamoException(f"no topic of a relay can be read: {reasons}")
        return {
            "data_centres": view.data_centres(),
            "candidates": [candidate.to_json() for candidate in view.find(query)],
        }
    finally:
        await view.close()


def _serve(flags: argparse.Namespace) -> int:
    """Answer over HTTP until SIGINT or SIGTERM."""
    from dynamo_es.services.dc_relay.process import serve_view

    env = os.environ
    config = load(RelayServeConfig, flags, env)
    logging_config = load(LoggingConfig, flags, env)
    view_config, log_config = load(RelayViewConfig, flags, env), load(LogConfig, flags, env)
    check_sources(view_config, log_config)
    set_up_logging(logging_config)
    bound_free_memory(env)

    async def serve() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        view = build_view(view_config, log_config)
        await serve_view(view, config.host, config.port, stop, _START_S, announce_ready)

    run_async(serve())
    return 0


def check_sources(config: RelayViewConfig, log_config: LogConfig) -> None:
    """Refuse logs that are not there, and that no other process could see. Opens nothing. Raises ``ConfigError``."""
    for source in _log_configs(config, log_config):
        check_log(source)
        check_log_exists(source)


def build_view(config: RelayViewConfig, log_config: LogConfig) -> GlobalKvView:
    """The view over all sources; not started."""
    from dynamo_es.services.dc_relay.global_view import GlobalKvView, RelaySource

    clock, rng = SystemClock(), random.SystemRandom()
    sources = [
        RelaySource(open_log(source.url, clock, rng=rng), source.namespace)
        for source in _log_configs(config, log_config)
    ]
    return GlobalKvView(sources, clock=clock, rng=rng, stale_after_s=config.stale_after_s)


def _log_configs(config: RelayViewConfig, log_config: LogConfig) -> list[LogConfig]:
    if not config.sources:
        return [log_config]
    found = []
    for text in config.sources:
        namespace, url = source_of(text)
        found.append(dataclasses.replace(log_config, url=url, namespace=namespace or log_config.namespace))
    return found


def _tokens(config: RelayQueryConfig) -> list[int]:
    if (config.token_ids is None) == (config.token_ids_file is None):
        raise ConfigError("the prompt is needed once: --token-ids 1,2,3 or --token-ids-file")
    if config.token_ids is not None:
        return [int(token) for token in config.token_ids.split(",")]
    path = config.token_ids_file or ""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_TOKENS_BYTES)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_TOKENS_BYTES)
        tokens = msgspec.json.decode(data, type=list[int])
    except OSError as error:
        raise ConfigError(f"--token-ids-file {path} cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--token-ids-file {path}: expected a JSON list of token ids: {error}") from error
    if not all(0 <= token < 2**32 for token in tokens):
        raise ConfigError(f"--token-ids-file {path}: a token id is from 0 to 4294967295")
    return tokens
