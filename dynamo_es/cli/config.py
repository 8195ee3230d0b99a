"""``dynamo-es config``: all options, and where their values come from."""

from __future__ import annotations

import argparse
import os
from typing import Any

from dynamo_es.clock import SystemClock
from dynamo_es.config.access_log_options import AccessLogConfig
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.dynamo_options import DynamoConfig
from dynamo_es.config.launch_options import LaunchConfig
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.options import add_flags, load, options_of, origins, redacted, reference
from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.config.relay_options import RelayConfig, RelayServeConfig, RelayViewConfig
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.transformers_options import TransformersConfig
from dynamo_es.config.tree import (
    FrontendConfig,
    HttpPathsConfig,
    IndexerConfig,
    LogConfig,
    LoggingConfig,
    MockConfig,
    RouterConfig,
    RuntimeConfig,
    StateConfig,
    StreamsConfig,
    SystemConfig,
    WorkerConfig,
)
from dynamo_es.config.vllm_options import VllmConfig
from dynamo_es.log.open import open_log

TREE: tuple[type[Any], ...] = (
    LogConfig, StateConfig, RuntimeConfig, SystemConfig, FrontendConfig, ChatProcessorConfig, LaunchConfig,
    HttpPathsConfig, TlsConfig, ApiKeysConfig, AccessLogConfig, TelemetryConfig, RouterConfig, AicConfig, DynamoConfig,
    IndexerConfig, RelayConfig, RelayViewConfig, RelayServeConfig, WorkerConfig, MockConfig, AttachConfig,
    TransformersConfig, VllmConfig, LoraConfig, StreamsConfig, LoggingConfig,
)  # fmt: skip


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("config", help="show all options, or the values that a process would use")
    parser.add_argument("--reference", action="store_true", help="print a Markdown table of all options instead")
    for config in TREE:
        # --model-path is the frontend's here, --block-size and --worker-type are the mock engine's.
        if config not in (WorkerConfig, TransformersConfig, VllmConfig):
            add_flags(parser, config)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Print. A value that no process would take is refused here as well."""
    if flags.reference:
        print(reference(TREE))
        return 0
    loaded = [load(config, flags, os.environ) for config in TREE]
    open_log(load(LogConfig, flags, os.environ).url, SystemClock())
    for values in loaded:
        shown = redacted(values)
        sources = origins(type(values), flags, os.environ)
        for item in options_of(type(values)):
            print(f"{item.spec.flag:45} {shown[item.name]!s:40} {sources[item.name]}")
    return 0
