"""What a diagnosis rests on: a frontend's ``/health``, and what the log tells. Pure.

Pages of a frontend are another process's word: what has another form than here is no page of a frontend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_es.errors import DynamoException
from dynamo_es.router.routing_report import RankReport, RoutingReport
from dynamo_es.runtime.progress import Stall

_OTHER_PAGE = "/health there is not that of a dynamo-es frontend of this release; give the base URL of one with --url"


class NoFrontend(DynamoException):
    """What answered is no frontend of dynamo-es, or nothing did; says what to do."""


class LogCondition(msgspec.Struct):
    """A frontend's log: ``ok``, or what is wrong and why."""

    state: str
    reason: str | None = None


class ViewState(msgspec.Struct):
    """A fold of a frontend, and how many records it is behind."""

    state: str
    lag_records: int = 0
    progress_percent: float | None = None


class NamedWorker(msgspec.Struct):
    """A worker with what is wrong with it."""

    instance_id: int
    reason: str
    remedy: str


class NamedWorkers(msgspec.Struct):
    """How many there are, and some of them."""

    count: int
    workers: list[NamedWorker]


class RemoteIndexState(msgspec.Struct):
    """The index of other processes: what nobody answers for."""

    missing_partitions: list[int]


class ModelHealth(msgspec.Struct):
    """One model of ``/health``. ``routed_as``: the model whose router it has, if it is an alias or an adapter."""

    ready: bool
    reason: str | None = None
    routing: RoutingReport | None = None
    refused_workers: NamedWorkers | None = None
    routed_as: str | None = None


class HealthPage(msgspec.Struct):
    """The part of a frontend's ``/health`` that matters here. ``refused_records``: by topic and reason.

    ``stage`` and ``message``: why the process takes no requests; then ``models`` may be None. ``log`` None: it has
    none, its engines are its own; or it drains.
    """

    status: str
    stage: str | None = None
    message: str = ""
    log: LogCondition | None = None
    views: dict[str, ViewState] = {}
    models: dict[str, ModelHealth] | None = None
    refused_records: dict[str, dict[str, int]] = {}
    stalled: list[Stall] = []
    remote_index: RemoteIndexState | None = None


def read_health(body: bytes) -> HealthPage:
    """Raises ``NoFrontend``."""
    try:
        page = msgspec.json.decode(body, type=HealthPage)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoFrontend(_OTHER_PAGE) from error
    if page.models is None and page.stage is None:
        raise NoFrontend(_OTHER_PAGE)  # a worker's, for one
    return page


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """A model as the log tells of it.

    Attributes:
        routing: From cards, KV events and recent decisions; its mode is empty if no decision says it.
        ranks: All ranks of its serving workers.
        workers: Serving workers.
    """

    routing: RoutingReport
    ranks: list[RankReport]
    workers: int


@dataclass(frozen=True, slots=True)
class LoggedFacts:
    """What the log tells.

    Attributes:
        models: By display name.
        unknown_versions: KV-event records of another version that readers refused, by source (``model/worker:rank``).
    """

    models: Mapping[str, LoggedModel] = field(default_factory=dict)
    unknown_versions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known, from either side; what could not be asked is None, and its problem says why.

    ``since``: what ``--since`` was, for the reader.
    """

    frontend: HealthPage | None = None
    frontend_problem: str = ""
    log: LoggedFacts | None = None
    log_problem: str = ""
    since: str = ""


def total(decisions: Mapping[str, Any]) -> int:
    """Decisions in all."""
    return sum(decisions.values())
