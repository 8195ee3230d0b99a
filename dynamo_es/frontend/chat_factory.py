"""A script's own chat engines (``chat_engine_factory`` of Dynamo's ``EntrypointArgs``) in the place of a processor.

Chat requests of a model go to the engine as clients wrote them, and its chunks go to the clients; it asks the workers
through the routed engine that it was made with. Text completions of the same model go the frontend's own way.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_es.errors import ConfigError
from dynamo_es.frontend.chat_processors import ChatProcessors
from dynamo_es.frontend.contracts import TEXT, ServedModel
from dynamo_es.frontend.in_process import InProcessEngine
from dynamo_es.frontend.processor_factory import ProcessorNotLoaded
from dynamo_es.frontend.python_engine import PythonAsyncEngine, RoutedEngine, TokenRoutedEngine
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.frontend.sglang_processor import SglangEngineFactory
from dynamo_es.frontend.vllm_processor import EngineFactory
from dynamo_es.models.deployment_card import ModelCardInstanceId, ModelDeploymentCard

ChatEngineFactory = Callable[[ModelCardInstanceId, ModelDeploymentCard, RoutedEngine], Any]
"""Makes a ``PythonAsyncEngine``, or an awaitable of one."""


class ChatEngines:
    """Makes the chat engine of each model that is found, by a script's factory. Belongs to one event loop."""

    def __init__(self, factory: ChatEngineFactory) -> None:
        self._factory = factory

    async def over(self, model: ServedModel) -> ServedModel:
        """``model`` with its chat engine; itself if it serves no chat, or its workers get text.

        Raises:
            ConfigError: The factory failed or made no ``PythonAsyncEngine``.
        """
        if "chat" not in model.families or model.takes_text:
            return model
        card = model.card
        identity, mdc = ModelCardInstanceId.of(card), ModelDeploymentCard.of(card)
        try:
            made = self._factory(identity, mdc, TokenRoutedEngine(model.engine))
            engine = await made if inspect.isawaitable(made) else made
        except ConfigError:
            raise
        except Exception as error:  # what a script raises is not known
            raise ProcessorNotLoaded(card.display_name, error) from error
        if not isinstance(engine, PythonAsyncEngine):
            found = type(engine).__name__
            raise ConfigError(f"chat_engine_factory: '{found}' object cannot be converted to 'PythonAsyncEngine'")
        chat = dataclasses.replace(
            model,
            card=msgspec.structs.replace(card, model_input=TEXT),
            tokenizer=NoTokenizer(),
            renderer=None,
            engine=InProcessEngine(engine),
            as_written=True,
        )
        return dataclasses.replace(model, chat=chat)


def own_processors(factory: Any) -> ChatProcessors | None:
    """The processors behind a factory of ours (``setup_engine_factory``); None: it is a script's.

    They are on the way of all requests then, with its metrics and its checks.
    """
    owner: Any = getattr(factory, "__self__", None)
    return ChatProcessors(owner) if isinstance(owner, EngineFactory | SglangEngineFactory) else None
