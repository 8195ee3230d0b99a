"""Dynamo's form of a chat processor: a generator from a chat request to chunks in envelopes (spec/frontend.md 8.4).

``ChatGenerator`` turns a ``ChatProcessor`` into one: it prepares, asks the routed engine and reads its answer. The
frontend itself prepares and reads by the same two methods, and routes and writes as for all its requests.
"""

from __future__ import annotations

import abc
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from dynamo_es.errors import DynamoException, InvalidArgument, Unknown
from dynamo_es.frontend.chat_envelopes import ChunkWriter, Envelope, as_error_envelope
from dynamo_es.frontend.chat_processing import ChatOutput, Flush, ProcessedChat
from dynamo_es.frontend.python_engine import RoutedEngine
from dynamo_es.frontend.utils import PreprocessError, handle_engine_error, make_internal_error, random_uuid
from dynamo_es.http_error import HttpError

logger = logging.getLogger(__name__)


class ChatGenerator(abc.ABC):
    """A ``ChatProcessor`` with its ``generator``. Subclasses say ``_prepare``.

    Args:
        routed_engine: Takes worker requests.
        now_s: Unix seconds, for ``created``.
        new_id: Makes the ids of responses.
    """

    def __init__(
        self,
        routed_engine: RoutedEngine,
        *,
        now_s: Callable[[], float] = time.time,
        new_id: Callable[[], str] = random_uuid,
    ) -> None:
        self._routed_engine = routed_engine
        self._now_s = now_s
        self._new_id = new_id

    @abc.abstractmethod
    def close(self) -> None:
        """See ``ChatProcessor``."""

    @abc.abstractmethod
    async def _prepare(self, request: dict[str, Any]) -> ProcessedChat:
        """As ``ChatProcessor.prepare``, with whatever errors the libraries behind it raise."""

    async def prepare(self, request: dict[str, Any]) -> ProcessedChat:
        """See ``ChatProcessor``."""
        try:
            return await self._prepare(request)
        except (HttpError, DynamoException):
            raise
        except PreprocessError as error:
            raise InvalidArgument(str(error)) from error
        except Exception as error:  # what libraries raise is not known; the request ends here
            raise Unknown(f"Preprocessing error: {error}") from error

    def _engine_error(self, error: Exception) -> Exception:
        """What is raised for an error of the routed engine."""
        return error

    async def generator(self, request: dict[str, Any], context: Any | None = None) -> AsyncGenerator[Envelope, None]:
        """Prepare, route and read one chat request; yields chunks in envelopes (``chat_envelopes``).

        Args:
            request: The client's, as JSON.
            context: Of the request; its stop reaches the worker.

        Raises:
            InvalidArgument, HttpError, Unknown: As ``prepare``.
        """
        request_id = self._new_id()
        chat = await self.prepare(request)
        prompt_tokens = len(chat.worker_request["token_ids"])
        writer = ChunkWriter(request, request_id, int(self._now_s()), prompt_tokens, chat.media)
        output = chat.open_output()
        items: Any = None
        try:
            stream = self._routed_engine.generate(chat.worker_request, context=context)
            items = await stream if inspect.isawaitable(stream) else stream
            async for envelope in _read(items, output, writer, request_id):
                yield envelope
        except Exception as error:
            told = self._engine_error(error)
            if told is error:
                raise
            raise told from error
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()


async def _read(
    items: AsyncIterator[Any], output: ChatOutput, writer: ChunkWriter, request_id: str
) -> AsyncGenerator[Envelope, None]:
    frame: Mapping[str, Any] = {}
    async for item in items:
        failure, found = _opened(item)
        if failure is not None:
            yield as_error_envelope(make_internal_error(request_id, failure))
            return
        if found is None:
            continue
        if not isinstance(found, dict) or "token_ids" not in found:
            yield as_error_envelope(handle_engine_error(found, request_id, logger))
            return
        frame = found
        flush = output.push(frame)
        if flush is not None:
            yield _written(writer, flush, frame)
            if flush.over:
                return
    flush = output.finish()
    if flush is not None:
        yield _written(writer, flush, frame)


def _opened(item: Any) -> tuple[str | None, Any]:
    """Error text and payload of an item, which is an annotated one or a plain frame."""
    if not hasattr(item, "is_error"):
        return None, item
    if item.is_error():
        return "; ".join(item.comments() or ()) or "unknown routed_engine error", None
    return None, item.data()


def _written(writer: ChunkWriter, flush: Flush, frame: Mapping[str, Any]) -> Envelope:
    return writer.write(flush.choices, flush.tokens, frame, finished=flush.over, cut=flush.cut, stop_reason=flush.stop)
