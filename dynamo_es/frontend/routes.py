"""The table of inference routes: what each path speaks, when it is served, and who answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend import media
from dynamo_es.frontend.anthropic import AnthropicDialect, MessageCountRoute
from dynamo_es.frontend.classify import ClassifyRoute
from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.dialects import Dialect, chat_dialect, completion_dialect
from dynamo_es.frontend.direct import DirectExchange, DirectRoute
from dynamo_es.frontend.embeddings import EmbeddingRoute
from dynamo_es.frontend.exchange import Exchange
from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.http_exchange import HttpExchange, Send, Speech
from dynamo_es.frontend.local import LocalExchange, LocalRoute
from dynamo_es.frontend.media import MediaRoute
from dynamo_es.frontend.pooling import PoolingRoute
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.rerank import RerankRoute
from dynamo_es.frontend.responses import ChatStyle
from dynamo_es.frontend.responses_api import InputCountRoute, ResponsesDialect
from dynamo_es.frontend.service import FrontendService

Gate = Literal["registered", "always", "announced", "never"]
_FIXED = (
    *(media.IMAGES, media.IMAGE_EDITS, media.VIDEOS, media.VIDEO_STREAM, media.SPEECH, media.REALTIME),
    *("/busy_threshold", "/openapi.json", "/docs", "/docs/"),
)
Start = Callable[[FrontendService, Receive, Send, RequestHeaders], HttpExchange]


class InferenceRoute(NamedTuple):
    """A route that the raw application serves.

    Attributes:
        speech: Its way of speaking.
        start: Makes what answers one request.
        gate: ``registered``: there while some registered model serves its family, else 404. ``always``: there.
            ``announced``: while no model serves its family, it says 501. ``never``: it always does.
        summary: For the API description.
        method: ``POST`` but for one.
        streams: It may answer with a stream.
    """

    speech: Speech
    start: Start
    gate: Gate
    summary: str
    method: str = "POST"
    streams: bool = False

    @property
    def family(self) -> Family:
        """What a model must serve."""
        return self.speech.family

    @property
    def body_type(self) -> type[msgspec.Struct]:
        """Type of its bodies, for the API description."""
        kind = self.speech.kind
        return kind.type if kind.described is None else kind.described


def generating(dialect: Dialect, gate: Gate, summary: str) -> InferenceRoute:
    """A route that generates."""

    def start(service: FrontendService, receive: Receive, send: Send, headers: RequestHeaders) -> HttpExchange:
        return Exchange(service, dialect, receive, send, headers)

    return InferenceRoute(dialect, start, gate, summary, streams=True)


def direct(route: DirectRoute, gate: Gate, summary: str, method: str = "POST") -> InferenceRoute:
    """A route whose workers answer with one item."""

    def start(service: FrontendService, receive: Receive, send: Send, headers: RequestHeaders) -> HttpExchange:
        return DirectExchange(service, route, receive, send, headers)

    return InferenceRoute(route, start, gate, summary, method)


def local(route: LocalRoute, summary: str) -> InferenceRoute:
    """A route that the frontend answers by itself."""

    def start(service: FrontendService, receive: Receive, send: Send, headers: RequestHeaders) -> HttpExchange:
        return LocalExchange(service, route, receive, send, headers)

    return InferenceRoute(route, start, "always", summary)


def inference_routes(
    config: FrontendConfig, paths: HttpPathsConfig, clock: Clock, new_id: Callable[[], str]
) -> Mapping[str, InferenceRoute]:
    """All inference routes by path. ``new_id`` makes UUIDs."""
    routes = [
        *_anthropic_routes(config, paths, new_id),
        (paths.chat, generating(chat_dialect(_chat_style(config)), "registered", "Chat completion")),
        (paths.completions, generating(completion_dialect(), "registered", "Text completion")),
        (paths.responses, generating(ResponsesDialect(clock, new_id), "always", "Response")),
        (f"{paths.responses}/input_tokens", local(InputCountRoute(), "Tokens of a response's input, estimated")),
        (paths.embeddings, direct(EmbeddingRoute(), "always", "Embeddings")),
        (paths.classify, direct(ClassifyRoute(), "registered", "Classification")),
        (paths.pooling, direct(PoolingRoute(), "registered", "Pooler output")),
        (paths.rerank, direct(RerankRoute(), "registered", "Documents by relevance")),
        *_media_routes(),
    ]
    return dict(routes)


def _chat_style(config: FrontendConfig) -> ChatStyle:
    return ChatStyle(
        config.reasoning_field_name, config.enable_streaming_tool_dispatch, config.enable_streaming_reasoning_dispatch
    )


def taken_paths(paths: HttpPathsConfig) -> list[str]:
    """Paths without parameters that the frontend's own routes have, or may have with other options."""
    own = (f"{paths.responses}/input_tokens", f"{paths.anthropic}/count_tokens")
    return [*dataclasses.astuple(paths), *_FIXED, *own]


def check_paths(paths: HttpPathsConfig) -> None:
    """Raises ``ConfigError`` if two routes have the same path."""
    used = taken_paths(paths)
    for path in used:
        if used.count(path) > 1 or path.startswith(f"{paths.models}/"):
            raise ConfigError(f"two routes have the path {path}; see --http-chat-path and the options like it")


def _anthropic_routes(
    config: FrontendConfig, paths: HttpPathsConfig, new_id: Callable[[], str]
) -> list[tuple[str, InferenceRoute]]:
    if not config.enable_anthropic_api:
        return []
    dialect = AnthropicDialect(new_id, strip_preamble=config.strip_anthropic_preamble)
    return [
        (paths.anthropic, generating(dialect, "always", "Message, in Anthropic's form")),
        (f"{paths.anthropic}/count_tokens", local(MessageCountRoute(), "Tokens of messages, estimated")),
    ]


def _media_routes() -> list[tuple[str, InferenceRoute]]:
    images, videos, speech = (
        MediaRoute("images", "images", "prompt"),
        MediaRoute("videos", "videos", "prompt"),
        MediaRoute("audio_speech", "audios", "input"),
    )
    realtime = MediaRoute("realtime", "realtime", "model")
    return [
        (media.IMAGES, direct(images, "announced", "Pictures")),
        (media.IMAGE_EDITS, direct(images, "announced", "Changed pictures")),
        (media.VIDEOS, direct(videos, "announced", "Videos")),
        (media.SPEECH, direct(speech, "announced", "Speech")),
        (media.VIDEO_STREAM, direct(videos, "never", "Videos as they are made: not implemented")),
        (media.REALTIME, direct(realtime, "never", "Conversation over a WebSocket: not implemented", "GET")),
    ]
