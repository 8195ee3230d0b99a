"""Finding out what an upstream is: its model, and whether it takes token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.engines.attach.dialects import DIALECTS, Dialect
from dynamo_es.engines.attach.metrics_page import MetricsPage, read_page, take_slots
from dynamo_es.engines.attach.upstream import Upstream
from dynamo_es.errors import ConfigError, Disconnected, Unknown

logger = logging.getLogger(__name__)
_SHOWN = 10
_MOST_TOKENS = 2**31 - 1
"""A context that is said to be longer is none."""
_SAMPLE = "Hello, World! 3.14 été\n\tdef f(x):"
MODELS_PATH = "/v1/models"
METRICS_PATH = "/metrics"
_SLOTS_PATH = "/slots"
DEFAULT_BLOCK_SIZE = 16
"""Tokens a block where the server does not say it."""
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Found:
    """What an upstream is.

    Attributes:
        model: Its model's name there.
        context_length: Tokens that the model takes; 0: not said.
        dialect: How it takes token ids; None: it gets text.
        block_size: Tokens a block of its KV cache; None: not said.
        total_blocks: Blocks of a rank's KV cache; None: not said.
    """

    model: str
    context_length: int
    dialect: Dialect | None
    block_size: int | None
    total_blocks: int | None


async def find_out(upstream: Upstream, config: AttachConfig, encode: Encode | None) -> Found:
    """Ask the upstream. ``encode``: of the tokenizer whose ids it would get; None: there is none.

    Raises:
        ConfigError: It has not the model that is asked for, or takes no token ids although it must, or its tokenizer
            is another one.
        CannotConnect, Disconnected, ConnectionTimeout: It cannot be asked now.
    """
    model, context_length = await find_model(upstream, config)
    dialect = await _find_dialect(upstream, config, model, encode)
    try:
        page = await read_metrics(upstream)
    except Unknown as error:
        logger.warning("%s", error)
        page = None
    return Found(
        model,
        context_length,
        dialect,
        None if page is None else page.block_size,
        None if page is None else page.total_blocks(config.kv_block_size or DEFAULT_BLOCK_SIZE),
    )


async def find_model(upstream: Upstream, config: AttachConfig) -> tuple[str, int]:
    """Name and context length of the model. Raises as ``find_out``."""
    answer = await upstream.ask(MODELS_PATH)
    if answer.status in (401, 403):
        raise ConfigError(
            f"{upstream.url}{MODELS_PATH} answered {answer.status}: give the server's key with --upstream-api-key-file"
        )
    if answer.status != 200:
        raise Disconnected(f"{upstream.url}{MODELS_PATH} answered {answer.status}")
    value = answer.json()
    rows = value.get("data") if isinstance(value, dict) else None
    models = {
        row["id"]: row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]
    }
    if config.model is not None:
        if config.model not in models:
            raise ConfigError(
                f"{upstream.url} has no model {config.model!r} (--upstream-model); it has {_names(models)}"
            )
        name = config.model
    else:
        # Adapters name the model that they extend.
        own = [name for name, row in models.items() if not row.get("parent")]
        if len(own) != 1:
            raise ConfigError(
                f"{upstream.url} lists {_names(own)}: say with --upstream-model which one this worker serves"
            )
        name = own[0]
    return name, _context_length(models[name])


async def read_metrics(upstream: Upstream) -> MetricsPage | None:
    """Its metrics; None: it shows none.

    Raises:
        CannotConnect, Disconnected, ConnectionTimeout: As ``Upstream.ask``.
        Unknown: It has some, and what it sent just now cannot be read; the next page may be.
    """
    answer = await upstream.ask(METRICS_PATH)
    if answer.status != 200:
        if answer.status >= 500 and answer.status != 501:
            raise Unknown(f"{upstream.url}{METRICS_PATH} answered {answer.status}")
        return None
    page = read_page(answer.body.decode("utf-8", "replace"))
    if page.wants_slots:
        slots = await upstream.ask(_SLOTS_PATH)
        if slots.status == 200:
            take_slots(page, slots.json())
    return page


async def _find_dialect(upstream: Upstream, config: AttachConfig, model: str, encode: Encode | None) -> Dialect | None:
    if config.input == "text" or config.api == "openai" or (encode is None and config.input == "auto"):
        if config.input == "tokens":
            raise ConfigError("--upstream-api openai takes text only; leave --upstream-input tokens out")
        return None
    if encode is None:
        raise ConfigError("--upstream-input tokens needs the model's files: give their directory with --model-path")
    for dialect in DIALECTS:
        if config.api in ("auto", dialect.name):
            answer = await upstream.ask(dialect.path, dialect.probe(model))
            if answer.status == 200 and dialect.understood(answer.json()):
                await _check_tokenizer(upstream, model, encode)
                return dialect
    if config.input == "tokens" or config.api != "auto":
        raise ConfigError(
            f"{upstream.url} takes no token ids as {config.api if config.api != 'auto' else 'any known server'} does; "
            "use --upstream-input text"
        )
    return None


async def _check_tokenizer(upstream: Upstream, model: str, encode: Encode) -> None:
    """Refuse a tokenizer that is not the server's, if the server has a way to tell."""
    bodies = (
        {"model": model, "prompt": _SAMPLE, "add_special_tokens": False},
        {"content": _SAMPLE, "add_special": False},
    )
    for body in bodies:
        answer = await upstream.ask("/tokenize", body)
        value = answer.json()
        theirs: Any = value.get("tokens") if answer.status == 200 and isinstance(value, dict) else None
        if isinstance(theirs, list) and theirs:
            if theirs != list(encode(_SAMPLE)):
                raise ConfigError(
                    f"the tokenizer in --model-path is not the one of {upstream.url}: the same text has other token ids"
                )
            return


def _context_length(row: dict[str, Any]) -> int:
    meta = row.get("meta")
    for value in (row.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_TOKENS:
            return value
    return 0


def _names(models: Any) -> str:
    names = list(models)
    shown = ", ".join(repr(name[:128]) for name in names[:_SHOWN])
    return (shown + (", …" if len(names) > _SHOWN else "")) or "no model"
