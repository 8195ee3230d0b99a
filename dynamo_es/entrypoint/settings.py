"""From an engine's arguments to the frontend's options: what is given counts, then the environment, then defaults."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.config.access_log_options import AccessLogConfig
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.options import load
from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig, RouterConfig
from dynamo_es.entrypoint.args import DEFAULT_HTTP_PORT
from dynamo_es.entrypoint.engine_config import EngineConfig
from dynamo_es.frontend.main import FrontendSettings
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.router.modes import mode_name
from dynamo_es.runtime.core import RuntimeSettings

_SAME_NAMES = (
    "http_host", "http_port", "namespace", "namespace_prefix", "migration_max_seq_len", "enable_anthropic_api",
    "strip_anthropic_preamble", "enable_streaming_tool_dispatch", "enable_streaming_reasoning_dispatch",
    "reasoning_field_name", "tokenizer_fallback",
)  # fmt: skip
_PORT_VARIABLE = "DYN_HTTP_PORT"


def frontend_settings(
    engine: EngineConfig, process: RuntimeSettings, extensions: Sequence[FrontendRoute] = ()
) -> FrontendSettings:
    """The options of a frontend before ``engine``.

    Raises:
        ConfigError: A value is wrong; names the frontend's flag, or the variable.
    """
    env = engine.env
    flags = _flags(engine.values, env)
    _add_routing(flags, engine.values["router_config"])
    if engine.folder is not None:
        _set(flags, FrontendConfig, "model_path", engine.folder)
    return FrontendSettings(
        process,
        load(FrontendConfig, flags, env),
        load(RouterConfig, None, env),
        load(AicConfig, None, env),
        load(HttpPathsConfig, None, env),
        load(ChatProcessorConfig, None, env),
        extensions,
        load(TlsConfig, flags, env),
        load(ApiKeysConfig, None, env),
        load(AccessLogConfig, None, env),
        plan=engine.plan,
        chat_engine_factory=engine.values["chat_engine_factory"],
    )


def _flags(values: Mapping[str, Any], env: Mapping[str, str]) -> argparse.Namespace:
    flags = argparse.Namespace()
    for name in _SAME_NAMES:
        _set(flags, FrontendConfig, name, values[name])
    if values["http_port"] is None and not env.get(_PORT_VARIABLE, "").strip():
        _set(flags, FrontendConfig, "http_port", DEFAULT_HTTP_PORT)
    # 0 stands for what the environment or the workers say.
    _set(flags, FrontendConfig, "kv_cache_block_size", values["kv_cache_block_size"] or None)
    _set(flags, FrontendConfig, "migration_limit", values["migration_limit"] or None)
    _set(flags, FrontendConfig, "metrics_prefix", (values["metrics_prefix"] or "").strip() or None)
    _set(flags, FrontendConfig, "tokenizer", values["tokenizer_backend"])
    _set(flags, TlsConfig, "cert_path", values["tls_cert_path"])
    _set(flags, TlsConfig, "key_path", values["tls_key_path"])
    return flags


def _add_routing(flags: argparse.Namespace, config: Any) -> None:
    """What of a ``RouterConfig`` the frontend has options for; the rest is in the plan."""
    if config is None:
        return
    _set(flags, FrontendConfig, "router_mode", mode_name(config.router_mode))
    for name in (
        "active_decode_blocks_threshold", "active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac",
    ):  # fmt: skip
        value = getattr(config.load_thresholds, name)
        # Not given in the script counts, too.
        _set(flags, FrontendConfig, name, "none" if value is None else value)


def _set(flags: argparse.Namespace, owner: type, name: str, value: Any) -> None:
    """As the command line would: text, or a boolean. None: it is not given."""
    if value is not None:
        setattr(flags, f"{owner.__name__}.{name}", value if isinstance(value, bool) else str(value))
