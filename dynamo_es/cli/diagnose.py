"""``dynamo-es diagnose``: why requests are, or are not, routed by cache."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import ssl
import sys
from pathlib import Path
from typing import Any

import msgspec

from dynamo_es.cli.process import check_log, check_log_exists, run_async, set_up_logging
from dynamo_es.clock import SystemClock
from dynamo_es.config.command_options import DiagnoseConfig, ToolLoggingConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.points_in_time import parse_since
from dynamo_es.config.tree import LogConfig
from dynamo_es.diagnosis.causes import diagnose
from dynamo_es.diagnosis.facts import Facts, HealthPage, LoggedFacts, NoFrontend
from dynamo_es.diagnosis.from_frontend import ask_frontend
from dynamo_es.diagnosis.from_log import read_log
from dynamo_es.diagnosis.text import MAX_LINE, text_of
from dynamo_es.errors import ConfigError
from dynamo_es.log.errors import LogError
from dynamo_es.log.open import open_log
from dynamo_es.log.secret_files import read_secret
from dynamo_es.runtime.letters import printable


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "diagnose",
        help="tell why requests are, or are not, routed by cache; exit code 1 if something is in the way",
        description="Asks a frontend (--url), the log (--log), or both. Changes nothing.",
    )
    add_flags(parser, DiagnoseConfig)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, LogConfig)
    add_flags(parser, ToolLoggingConfig)
    parser.set_defaults(run=_run)


def _run(flags: argparse.Namespace) -> int:
    config = load(DiagnoseConfig, flags, os.environ)
    log_config = load(LogConfig, flags, os.environ)
    logging_config = load(ToolLoggingConfig, flags, os.environ)
    # With a frontend to ask, a log that nobody named is none of ours.
    reads_log = config.url is None or log_config.url != LogConfig().url
    if reads_log:
        check_log(log_config)
        check_log_exists(log_config)
    headers, tls = _access(config)
    set_up_logging(logging_config)
    facts = run_async(_gather(config, log_config if reads_log else None, headers, tls))
    if facts.frontend is None and facts.log is None:
        print(f"dynamo-es: {printable(facts.frontend_problem or facts.log_problem, MAX_LINE)}", file=sys.stderr)
        return 2
    found = diagnose(facts, config.model)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        for line in text_of(found):
            print(line)
    return 0 if found.healthy else 1


def _access(config: DiagnoseConfig) -> tuple[dict[str, str], ssl.SSLContext | bool]:
    """Headers and certificates for the frontend. Reads files. Raises ``ConfigError``."""
    headers = {}
    if config.api_key_file is not None:
        headers["Authorization"] = f"Bearer {read_secret(Path(config.api_key_file))}"
    if config.ca_cert_path is None:
        return headers, True
    try:
        return headers, ssl.create_default_context(cafile=config.ca_cert_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the certificates in {config.ca_cert_path} (--ca-cert-path): {error}") from error


async def _gather(
    config: DiagnoseConfig, log_config: LogConfig | None, headers: dict[str, str], tls: ssl.SSLContext | bool
) -> Facts:
    page: HealthPage | None = None
    logged: LoggedFacts | None = None
    page_problem = log_problem = ""
    if config.url is not None:
        try:
            page = await ask_frontend(config.url, timeout_s=config.timeout_s, tls=tls, headers=headers)
        except NoFrontend as error:
            page_problem = str(error)
    if log_config is not None:
        try:
            async with asyncio.timeout(config.timeout_s):
                logged = await _ask_log(log_config, config.since)
        except LogError as error:
            log_problem = str(error)
        except TimeoutError:
            log_problem = f"{log_config.url} did not tell all within {config.timeout_s:g} s (--timeout)"
    return Facts(page, page_problem, logged, log_problem, config.since)


async def _ask_log(config: LogConfig, since: str) -> LoggedFacts:
    clock = SystemClock()
    log = open_log(config.url, clock, rng=random.SystemRandom())
    await log.start()
    try:
        return await read_log(log, config.namespace, parse_since(since, clock.now_ms()))
    finally:
        await log.close()
