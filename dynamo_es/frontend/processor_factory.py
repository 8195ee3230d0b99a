"""What the factories of chat processors share: a model's directory, options, preprocess workers."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from dynamo_es.errors import ConfigError
from dynamo_es.frontend.tokenizer_files import ModelFiles
from dynamo_es.frontend.utils import read_jinja_chat_template, worker_warmup
from dynamo_es.models.deployment_card import ModelDeploymentCard

logger = logging.getLogger(__name__)

DEFAULT_STREAM_INTERVAL = 20
"""Tokens a chunk after the first, as in Dynamo."""
WARM_UP_S = 120.0


class ProcessorConfig(Protocol):
    """The options of a frontend that its chat processors need."""

    @property
    def preprocess_workers(self) -> int:
        """Processes that prepare requests; 0: threads do."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether code in a model's directory may run."""

    @property
    def exclude_tools_when_tool_choice_none(self) -> bool:
        """Whether templates see no tools if none may be called."""


class ProcessorNotLoaded(ConfigError):
    """A model's chat processor could not be made from its files.

    Attributes:
        model: The model's name.
    """

    def __init__(self, model: str, error: Exception) -> None:
        super().__init__(f"the chat processor of model {model} cannot be made: {type(error).__name__}: {error}")
        self.model = model


class ModelFolder:
    """The directory of a model that serves chat.

    Args:
        mdc: The model's card.
        folder: Its directory here; None: where its card says.

    Raises:
        RuntimeError: It serves no chat, or there is no such directory.
    """

    def __init__(self, mdc: ModelDeploymentCard, folder: str | None = None) -> None:
        if not mdc.model_type().supports_chat():
            raise RuntimeError(f"model {mdc.name()} serves no chat: its type is {mdc.model_type()}")
        self.path = mdc.source_path() if folder is None else folder
        if not Path(self.path).is_dir():
            raise RuntimeError(
                f"model {mdc.name()}: {self.path} is no directory here; a chat processor needs the model's files, set "
                "--model-path to a local copy of them"
            )
        self._runtime = mdc.runtime_config()

    def named(self, key: str) -> str | None:
        """A parser's name in the card's runtime config; None if it has none."""
        name = self._runtime.get(key)
        return name.strip() if isinstance(name, str) and name.strip() else None

    def eos_token_ids(self, vocabulary: Mapping[str, int]) -> list[int]:
        """Ids that end an answer, as the default processor takes them."""
        return list(ModelFiles(Path(self.path)).eos_ids(vocabulary))


def checked_template(path: str) -> str:
    """Text of a ``.jinja`` file for SGLang.

    Raises:
        ConfigError: It is none.
    """
    if not path.endswith(".jinja") or not Path(path).is_file():
        raise ConfigError(f"--chat-template {path}: it must be an existing .jinja file")
    return read_jinja_chat_template(path, backend="sglang")


def stream_interval(variable: str, runtime_config: Mapping[str, Any], env: Mapping[str, str] | None = None) -> int:
    """Tokens a chunk: the environment variable's, else ``runtime_data.stream_interval`` of the card, else the default.

    A value that is no number from 1 on is told and ignored.
    """
    told = (os.environ if env is None else env).get(variable, "").strip()
    if told:
        if told.isdecimal() and int(told) >= 1:
            return int(told)
        logger.warning("%s=%s is no whole number from 1 on; %d is used", variable, told, DEFAULT_STREAM_INTERVAL)
        return DEFAULT_STREAM_INTERVAL
    data = runtime_config.get("runtime_data")
    advertised = data.get("stream_interval") if isinstance(data, Mapping) else None
    if isinstance(advertised, int) and not isinstance(advertised, bool) and advertised >= 1:
        return advertised
    return DEFAULT_STREAM_INTERVAL


async def warmed_up_pool(workers: int, timeout_s: float = WARM_UP_S) -> ProcessPoolExecutor:
    """Processes that prepare requests, started.

    Raises:
        RuntimeError: They did not start in ``timeout_s``.
    """
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(loop.run_in_executor(pool, worker_warmup) for _ in range(workers)))
    except TimeoutError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise RuntimeError(f"{workers} preprocess workers did not start within {timeout_s:g} s") from error
    return pool
