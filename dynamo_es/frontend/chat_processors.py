"""The chat processors of a frontend: which there are by its options, and one for every model that serves chat.

``setup_engine_factory`` and ``setup_sglang_engine_factory`` are Dynamo's (``dynamo.frontend.main``).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.chat_processing import ChatProcessor
from dynamo_es.frontend.contracts import TokenEngine, families_of
from dynamo_es.frontend.extras import MissingExtra
from dynamo_es.frontend.processor_factory import ProcessorConfig, ProcessorNotLoaded
from dynamo_es.frontend.python_engine import RoutedEngine, TokenRoutedEngine
from dynamo_es.frontend.sglang_processor import SglangEngineFactory
from dynamo_es.frontend.vllm_processor import EngineFactory
from dynamo_es.models.deployment_card import ModelDeploymentCard
from schemas.registry import ModelCard

logger = logging.getLogger(__name__)
SGLANG_FLAGS = ("tool_call_parser", "reasoning_parser", "chat_template")


class DebugsPerformance(ProcessorConfig, Protocol):
    """A frontend's configuration as Dynamo has it."""

    @property
    def debug_perf(self) -> bool:
        """Whether to tell how long preparing takes."""


class ProcessorFactory(Protocol):
    """Makes the processor of a model."""

    async def build_processor(
        self, mdc: ModelDeploymentCard, routed_engine: RoutedEngine, folder: str | None = None
    ) -> ChatProcessor:
        """Read the model's files; ``folder``: where they are here, if that is not where its card says."""


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """A ``ProcessorConfig`` from this frontend's options."""

    preprocess_workers: int = 0
    trust_remote_code: bool = False
    exclude_tools_when_tool_choice_none: bool = True


def setup_engine_factory(config: ProcessorConfig, vllm_flags: Namespace, **parts: Any) -> EngineFactory:
    """What makes chat engines with vLLM as their processor. Nothing of vLLM is imported yet."""
    return EngineFactory(config, vllm_flags, **parts)


def setup_sglang_engine_factory(
    config: DebugsPerformance, sglang_flags: Namespace | None = None, **parts: Any
) -> SglangEngineFactory:
    """What makes chat engines with SGLang as their processor. Nothing of SGLang is imported yet."""
    tool_call_parser, reasoning_parser, template = (getattr(sglang_flags, name, None) for name in SGLANG_FLAGS)
    return SglangEngineFactory(config, config.debug_perf, tool_call_parser, reasoning_parser, template, **parts)


class ChatProcessors:
    """Makes a processor for each model that is found. Belongs to one event loop."""

    def __init__(self, factory: ProcessorFactory) -> None:
        self._factory = factory

    async def build(self, card: ModelCard, engine: TokenEngine, folder: str | None) -> ChatProcessor | None:
        """The processor of a model; None if it serves no chat, or its workers get text.

        Raises:
            ConfigError: Its files are not here, or the library cannot take them.
        """
        if "chat" not in families_of(card.model_type) or card.model_input != "Tokens":
            return None
        mdc = ModelDeploymentCard.of(card)
        try:
            return await self._factory.build_processor(mdc, TokenRoutedEngine(engine), folder)
        except ConfigError:
            raise
        except Exception as error:  # what these libraries raise about a model's files is not known
            raise ProcessorNotLoaded(card.display_name, error) from error


def chat_processors(
    config: ChatProcessorConfig,
    settings: ProcessorSettings,
    executor: Executor | None,
    now_s: Callable[[], float],
) -> ChatProcessors | None:
    """What the options ask for; None: the frontend's own way.

    Raises:
        MissingExtra: The library is not installed.
        ConfigError: The options do not go together.
    """
    name = config.chat_processor
    if name == "dynamo":
        given = [flag for flag in SGLANG_FLAGS if getattr(config, flag) is not None]
        if given:
            flag = given[0].replace("_", "-")
            raise ConfigError(
                f"--{flag} needs --dyn-chat-processor vllm or sglang; a model's own card says it otherwise"
            )
        if settings.preprocess_workers:
            logger.warning(
                "--dyn-preprocess-workers is for --dyn-chat-processor sglang and has no effect here: "
                "--preprocess-threads says how many requests are tokenized at a time"
            )
        return None
    if find_spec(name) is None:
        raise MissingExtra(name, name)
    if name == "vllm":
        if config.chat_template is not None:
            raise ConfigError(
                "--chat-template is for --dyn-chat-processor sglang; put the file into the model's directory"
            )
        if settings.preprocess_workers:
            raise ConfigError(
                "--dyn-preprocess-workers is not for --dyn-chat-processor vllm: it has threads of its own"
            )
        flags = Namespace(tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser)
        return ChatProcessors(setup_engine_factory(settings, flags, now_s=now_s))
    return ChatProcessors(
        SglangEngineFactory(
            settings,
            config.debug_perf,
            config.tool_call_parser,
            config.reasoning_parser,
            config.chat_template,
            executor=executor,
            now_s=now_s,
        )
    )
