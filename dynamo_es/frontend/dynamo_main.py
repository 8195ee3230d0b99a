"""Dynamo's way to start the frontend: ``python -m dynamo_es.frontend``, ``parse_args`` and ``async_main``.

The command line is Dynamo's (``frontend_args``); what Dynamo has no flag for, the log for one, comes from the
environment (``DYN_ES_LOG``). It is translated to the frontend's own options, which say what they accept.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamo_es import __version__
from dynamo_es.config.options import options_of
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.frontend.frontend_arg_table import ARGUMENTS, Argument
from dynamo_es.frontend.frontend_args import FrontendArgGroup, FrontendConfig

logger = logging.getLogger(__name__)

_PROCESSOR_FLAGS = ("--tool-call-parser", "--reasoning-parser", "--chat-template")
_LOAD_MODELS = {"ais": "aic"}


class HasShutdown(Protocol):
    """A runtime that can be told to end (``DistributedRuntime``)."""

    def shutdown(self) -> None:
        """Begin to end; returns at once."""


def parse_args() -> tuple[FrontendConfig, argparse.Namespace | None, argparse.Namespace | None]:
    """This process's command line (``dynamo.frontend.main``): configuration, vLLM's flags, SGLang's flags.

    Raises:
        ValueError: Arguments that do not go together.
        SystemExit: 2 for a wrong argument, 1 for one that nobody knows.
    """
    parser = argparse.ArgumentParser(prog="python -m dynamo_es.frontend", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dynamo-es Frontend {__version__}")
    FrontendArgGroup().add_arguments(parser)
    known, unknown = parser.parse_known_args()
    config = FrontendConfig.from_cli_args(known)
    config.validate()
    vllm_flags = sglang_flags = None
    if config.chat_processor == "vllm":
        vllm_flags = _vllm_flags(unknown)
    elif config.chat_processor == "sglang":
        sglang_flags, unknown = _sglang_flags(unknown)
        _refuse(unknown)
    else:
        _refuse(unknown)
    return config, vllm_flags, sglang_flags


async def graceful_shutdown(runtime: HasShutdown) -> None:
    """End the runtime (``dynamo.frontend.main``)."""
    runtime.shutdown()


async def async_main() -> None:
    """Parse the command line and serve until SIGINT or SIGTERM (``dynamo.frontend.main``).

    Raises:
        ValueError, DynamoException: It cannot start as it is configured.
    """
    # The verbs of the command line import this package.
    from dynamo_es.cli.launch import prepare, read_launch, serve
    from dynamo_es.cli.process import stop_on_signals

    # A frontend shows its state on its own port.
    os.environ.pop("DYN_SYSTEM_PORT", None)
    config, vllm_flags, sglang_flags = parse_args()
    launch = read_launch(translated(config, vllm_flags or sglang_flags, os.environ), os.environ)
    launch = prepare(launch)
    stop = asyncio.Event()
    stop_on_signals(stop)
    await serve(launch, stop)


def main() -> None:
    """Entry point of ``python -m dynamo_es.frontend`` (``dynamo.frontend.main``)."""
    from dynamo_es.cli.process import run_async

    try:
        run_async(async_main())
    except (DynamoException, ValueError) as error:
        sys.stderr.write(f"dynamo-es: {error}\n")
        raise SystemExit(2) from error


def translated(
    config: FrontendConfig, processor: argparse.Namespace | None = None, environ: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """The same as flags of ``dynamo-es frontend``. What has Dynamo's default is left out.

    ``processor``: the flags of vLLM or SGLang, of which parsers and template count here. ``environ``: where options
    that are left out are looked for afterwards, so that what is in there must not be left out.

    Raises:
        ConfigError: An argument that this version has not.
    """
    from dynamo_es.cli.launch import CONFIGS

    places = {item.spec.flag: f"{owner.__name__}.{item.name}" for owner in CONFIGS for item in options_of(owner)}
    flags = argparse.Namespace()
    for argument in ARGUMENTS:
        value = getattr(config, argument.dest)
        is_default = value == argument.default or (argument.kind == "list" and not value)
        if is_default and not (environ or {}).get(argument.env, "").strip():
            continue
        place = places.get(argument.flags[0])
        if place is None:
            raise ConfigError(f"{argument.flags[0]} ({argument.env}) is not in this version")
        setattr(flags, place, _text(argument, value))
    for flag in _PROCESSOR_FLAGS:
        value = getattr(processor, flag.removeprefix("--").replace("-", "_"), None)
        if value:
            setattr(flags, places[flag], str(value))
    return flags


def _text(argument: Argument, value: Any) -> Any:
    if argument.kind == "list":
        return list(value)
    if isinstance(value, bool):
        return value
    if value is None:
        return "none"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _LOAD_MODELS.get(value, value) if argument.dest == "router_prefill_load_model" else str(value)


def _refuse(unknown: Sequence[str]) -> None:
    if unknown:
        logger.error("unknown arguments: %s", " ".join(unknown))
        raise SystemExit(1)


def _sglang_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _PROCESSOR_FLAGS:
        parser.add_argument(flag, default=None)
    return parser.parse_known_args(arguments)


def _vllm_flags(arguments: Sequence[str]) -> argparse.Namespace:
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.cli_args import FrontendArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        logger.error("--dyn-chat-processor vllm needs the extra vllm: %s", error)
        raise SystemExit(1) from error
    parser = AsyncEngineArgs.add_cli_args(FrontendArgs.add_cli_args(FlexibleArgumentParser(add_help=False)))
    flags: argparse.Namespace = parser.parse_args(list(arguments))
    return flags
