"""What the HTTP frontend needs from the rest of dynamo-es: models, engines, health. No I/O here.

Call order: the application asks ``ModelDirectory.find`` once a request, renders and tokenizes with the ``ServedModel``
it got, and iterates ``TokenEngine.generate`` to its end or closes it. Everything here belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

from dynamo_es.background import DeadTask
from dynamo_es.frontend.chat_processing import ChatProcessor
from dynamo_es.frontend.membership import Refusal
from dynamo_es.frontend.parsers.model import ModelParsers, parsers_of
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.thinking import runtime_default_thinking_mode
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.router.routing_report import RoutingReport
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.placement import Placement
from schemas.registry import ModelCard

Family = Literal[
    "chat", "completions", "embedding", "classify", "pooling", "rerank", "images", "videos", "audios", "realtime"
]
TEXT = "Text"
"""``model_input`` of workers that get text."""
NOT_READY = "not_ready"
"""Value of ``status`` in ``/health`` of a process that is to get no requests."""


class CompletionUsage(TypedDict):
    """Token counts as the worker saw them; ``prompt_tokens`` and the details win over the frontend's own."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int] | None]
    completion_tokens_details: NotRequired[dict[str, int] | None]


class Frame(TypedDict):
    """One item of a worker's stream (spec/frontend.md 4.1, 4.2). Keys that are not given count as None.

    ``finish_reason`` is None, ``stop``, ``eos``, ``cancelled``, ``abort``, ``length`` or ``content_filter``; anything
    else fails the request. ``index`` None means choice 0. ``log_probs`` has one value a token, ``top_logprobs`` one
    list of ``{rank, token_id, token, logprob}`` a token.
    """

    token_ids: list[int]
    text: NotRequired[str | None]
    finish_reason: NotRequired[str | None]
    index: NotRequired[int | None]
    log_probs: NotRequired[list[float] | None]
    top_logprobs: NotRequired[list[list[dict[str, Any]]] | None]
    completion_usage: NotRequired[CompletionUsage | None]
    stop_reason: NotRequired[str | int | None]


class TokenEngine(Protocol):
    """Sends a preprocessed request to a worker and hands back what it says."""

    def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Frames as they come: each item is the list of all frames that are ready, at least one.

        An async generator. Its consumer either takes it to its end or calls ``aclose`` (or is cancelled inside it);
        in both cases the worker must be told to stop and every booking be freed before the generator returns.
        ``context.stop_generating`` is called before a close that the client or a stop string caused.

        Raises:
            InvalidArgument: The worker refuses the request; its text is shown to the client.
            HttpError: The worker asserts an HTTP status.
            CannotConnect, Disconnected, StreamIncomplete, EngineShutdown: 503.
            ConnectionTimeout: 504.
            Cancelled: 499.
            Unknown and any other: 500; never shown to the client.
        """


@runtime_checkable
class LocatingEngine(TokenEngine, Protocol):
    """A ``TokenEngine`` that can say where a request would go."""

    async def locate(self, request: dict[str, Any], context: Context) -> Placement | None:
        """Where it would go now; nothing is sent or booked. None: only sending it would tell.

        Raises as ``generate``.
        """


@runtime_checkable
class LaneEngine(TokenEngine, Protocol):
    """A ``TokenEngine`` whose frames may go past its generator."""

    def generate_by(
        self, request: dict[str, Any], context: Context, lane: Lane
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """As ``generate``; what the reader of ``lane`` takes there is not iterated."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model that can be asked now.

    Attributes:
        name: Primary name; responses and metrics carry it, whatever alias the request used.
        card: What its workers registered.
        tokenizer: Its tokenizer.
        renderer: Its chat template; None if it has none, chat is then refused with 400.
        engine: Where its requests go.
        created: Unix seconds when this process first saw it.
        is_overloaded: Whether all of its workers are above a busy threshold now. Asked before a stream's status is
            sent, when it is too late for one of its own; requests are refused by the engine in any case.
        processor: Who prepares its chat requests and reads their output; None: the frontend itself.
        keeps_tools: Its template gets the tools of requests with ``tool_choice`` none, too.
        chat: Who answers its chat requests in its place; None: itself.
        as_written: Its engine gets text requests as the client wrote them, also those that are no streams; by default
            it gets all of them as streams.
        families: Routes that serve it; derived from ``card.model_type``.
        parsers: How its thoughts and tool calls are read; derived from the card and the tokenizer.
        lane_engine: ``engine``, if it is a ``LaneEngine``.
    """

    name: str
    card: ModelCard
    tokenizer: Tokenizer
    renderer: ChatRenderer | None
    engine: TokenEngine
    created: int
    is_overloaded: Callable[[], bool] = lambda: False
    keeps_tools: bool = False
    processor: ChatProcessor | None = None
    chat: ServedModel | None = None
    as_written: bool = False
    families: frozenset[str] = field(init=False)
    parsers: ModelParsers = field(init=False)
    lane_engine: LaneEngine | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", families_of(self.card.model_type))
        object.__setattr__(self, "parsers", parsers_of(self.card.runtime_config, self.tokenizer))
        object.__setattr__(self, "lane_engine", self.engine if isinstance(self.engine, LaneEngine) else None)

    @property
    def takes_text(self) -> bool:
        """Whether its workers get requests as clients write them, and answer likewise."""
        return self.card.model_input == TEXT

    @property
    def default_thinking_mode(self) -> str | None:
        """Whether it thinks if a request says nothing about that: ``enabled``, ``disabled`` or None."""
        return runtime_default_thinking_mode(self.card.runtime_config)


def families_of(model_type: str) -> frozenset[str]:
    """Route families of a card's ``model_type`` (``Chat | Completions`` -> chat, completions)."""
    return frozenset(part.strip().lower() for part in model_type.split("|") if part.strip())


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Readiness of a known model.

    Attributes:
        ready: Some namespace has a live worker of every required type.
        reason: Why not; None when ready.
        namespaces: For each namespace ``{ready, [reason], worker_types: {type: {workers, needs}}, present,
            missing_worker_types}``, as ``/v1/models/{id}/ready`` shows it (spec/frontend.md 1.4).
        refused: Workers that registered something else under the model's name, by instance id.
        block_size: Tokens a block in the model's router; 0: it has none.
        other_block_sizes: Workers that serve with blocks of another size, and theirs; their caches earn no credit.
        routed_as: The model whose router its requests take, if it is another name: it is an alias, or an adapter.
        routing: How its requests are routed and what is known of its workers' caches; None: nothing routes it yet. Not
            asked for a page of metrics: it looks at every worker.
    """

    ready: bool
    reason: str | None = None
    namespaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    block_size: int = 0
    other_block_sizes: Mapping[int, int] = field(default_factory=dict)
    routed_as: str | None = None
    routing: Callable[[], RoutingReport | None] = lambda: None


class ModelDirectory(Protocol):
    """The models of the fleet, a view of the registry. No call blocks."""

    def find(self, name: str) -> ServedModel:
        """The model called ``name``, or of which ``name`` is an alias.

        Raises:
            ModelNotFound: Nobody registered it.
            ModelNotReady: It is registered, and nothing can serve it just now.
        """

    def models(self) -> Sequence[tuple[str, ServedModel]]:
        """All names under which a ready model can be asked, aliases included, each with its model."""

    def statuses(self) -> Mapping[str, ModelStatus]:
        """Status of every known model, ready or not, by each of its names."""

    def serves(self, family: Family) -> bool:
        """Whether any registered model, ready or not, belongs to this route family; if not, its route is a 404."""

    def primary_name(self, name: str) -> str:
        """Name of the known model, ready or not, that ``name`` is or is an alias of.

        Raises:
            ModelNotFound: Nobody registered it.
        """

    def thresholds(self) -> Mapping[str, BusyThresholds]:
        """Above what a worker counts as busy, for every known model by its primary name."""

    def set_thresholds(self, primary_name: str, thresholds: BusyThresholds) -> None:
        """From now on, until the model's last worker leaves. The model is known."""


class HealthSource(Protocol):
    """States of what the frontend depends on."""

    def report(self) -> Mapping[str, Any]:
        """Entries of ``/health``: ``endpoints``, ``instances`` and the states of log, stores and models. Cheap.

        ``status`` ``degraded`` says that serving goes on and something needs an operator; ``not_ready`` makes it a
        503, so that a load balancer leaves this process out.

        Must be JSON (msgspec can encode it) and hold no secrets. An entry ``status`` replaces ``healthy``.
        """

    def dead_tasks(self) -> Sequence[DeadTask]:
        """Background tasks that died, for ``/live``: only a restart brings them back. Cheap."""
