"""``dynamo-es worker``: a process that serves a model."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

from dynamo_es.cli.process import announce_ready, load_process, serve_process
from dynamo_es.clock import SystemClock
from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.transformers_options import TransformersConfig
from dynamo_es.config.tree import (
    LogConfig,
    LoggingConfig,
    MockConfig,
    RuntimeConfig,
    StateConfig,
    SystemConfig,
    WorkerConfig,
)
from dynamo_es.config.vllm_options import VllmConfig
from dynamo_es.engines.attach.worker import AttachSettings, check_settings, run_attached_worker
from dynamo_es.engines.mock_worker import MockWorkerSettings, run_mock_workers
from dynamo_es.engines.transformers_engine.worker import TransformersWorkerSettings, run_transformers_worker
from dynamo_es.engines.vllm_engine.worker import VllmWorkerSettings, run_vllm_worker


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("worker", help="serve a model on the request plane")
    engines = parser.add_subparsers(title="engines", metavar="ENGINE", required=True)
    mock = engines.add_parser("mock", help="an engine without a model: real scheduling, cache and timing, made-up text")
    _add_options(mock, MockConfig, LoraConfig)
    mock.set_defaults(run=run_mock)
    small = engines.add_parser("transformers", help="small models on a CPU or one GPU (extra transformers-engine)")
    _add_options(small, TransformersConfig, LoraConfig)
    small.set_defaults(run=run_transformers)
    attach = engines.add_parser(
        "attach", help="a running OpenAI-compatible server (vllm serve, SGLang, llama.cpp, ...)"
    )
    _add_options(attach, AttachConfig)
    attach.set_defaults(run=run_attach)
    vllm = engines.add_parser("vllm", help="vLLM in this process (extra vllm); its own flags follow --")
    _add_options(vllm, VllmConfig, LoraConfig)
    vllm.add_argument("engine_arguments", nargs="*", metavar="-- VLLM_FLAGS", help="flags of vllm serve, behind --")
    vllm.set_defaults(run=run_vllm)


def _add_options(parser: argparse.ArgumentParser, *engine: type) -> None:
    """The options of the engine, if it has any here, and those of every worker."""
    for config in (
        WorkerConfig, *engine, LogConfig, StateConfig, RuntimeConfig, SystemConfig, TelemetryConfig, LoggingConfig,
    ):  # fmt: skip
        add_flags(parser, config)


def run_mock(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "worker")
    settings = MockWorkerSettings(
        process, load(WorkerConfig, flags, env), load(MockConfig, flags, env), load(LoraConfig, flags, env)
    )
    serve_process(process, logging_config, lambda stop: _serve(settings, stop))
    return 0


def run_transformers(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "worker")
    settings = TransformersWorkerSettings(
        process, load(WorkerConfig, flags, env), load(TransformersConfig, flags, env), load(LoraConfig, flags, env)
    )
    serve_process(process, logging_config, lambda stop: _serve_transformers(settings, stop))
    return 0


async def _serve_transformers(settings: TransformersWorkerSettings, stop: asyncio.Event) -> None:
    await run_transformers_worker(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=_announce)


async def _serve(settings: MockWorkerSettings, stop: asyncio.Event) -> None:
    await run_mock_workers(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=_announce)


def run_attach(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "worker")
    settings = AttachSettings(process, load(WorkerConfig, flags, env), load(AttachConfig, flags, env))
    check_settings(settings)
    serve_process(
        process,
        logging_config,
        lambda stop: run_attached_worker(
            settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=_announce
        ),
    )
    return 0


def run_vllm(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "worker")
    settings = VllmWorkerSettings(
        process,
        load(WorkerConfig, flags, env),
        tuple(flags.engine_arguments),
        load(VllmConfig, flags, env),
        load(LoraConfig, flags, env),
    )
    serve_process(
        process,
        logging_config,
        lambda stop: run_vllm_worker(
            settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=_announce
        ),
    )
    return 0


def _announce(worker_id: int) -> None:
    announce_ready(f"worker {worker_id}")
