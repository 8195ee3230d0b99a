"""Parts that frontend tests share: a scripted engine, a directory, a health source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_es.background import DeadTask
from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import Family, ModelStatus, ServedModel, TokenEngine
from dynamo_es.frontend.errors import ModelNotFound, ModelNotReady
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import BYTES_TEMPLATE, BytesTokenizer, Tokenizer
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.runtime.context import Context
from schemas.registry import ModelCard

Script = Callable[[dict[str, Any], Context], AsyncGenerator[list[dict[str, Any]], None]]


def frame(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"token_ids": list(text.encode()), "finish_reason": finish, **more}


@dataclass
class ScriptedEngine:
    """Runs ``script``; remembers requests, contexts and how each stream ended."""

    script: Script
    requests: list[dict[str, Any]] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        self.requests.append(request)
        self.contexts.append(context)
        how = "complete"
        stream = self.script(request, context)
        try:
            async for frames in stream:
                yield frames
        except GeneratorExit:
            how = "closed"
            raise
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        except Exception:
            how = "failed"
            raise
        finally:
            await stream.aclose()
            self.ended.append(how)
            self.closed.set()


def says(*frames: dict[str, Any] | list[dict[str, Any]] | Exception) -> Script:
    """A script that yields these, whatever it is asked; an exception is raised at its place."""

    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        for item in frames:
            if isinstance(item, Exception):
                raise item
            yield [dict(one) for one in item] if isinstance(item, list) else [dict(item)]

    return script


def card(name: str = "m", **changes: Any) -> ModelCard:
    values: dict[str, Any] = {
        "version": 1,
        "namespace": "ns",
        "component": "backend",
        "endpoint": "generate",
        "instance_id": 1,
        "lease_id": 1,
        "suffix": "",
        "display_name": name,
        "source_path": "builtin:bytes",
        "model_input": "Tokens",
        "model_type": "Chat | Completions",
        "worker_type": "aggregated",
        "needs": [],
        "context_length": 0,
        "kv_cache_block_size": 16,
    }
    return ModelCard(**{**values, **changes})


def served(engine: TokenEngine, name: str = "m", tokenizer: Tokenizer | None = None, **changes: Any) -> ServedModel:
    used = tokenizer or BytesTokenizer()
    return ServedModel(
        name=name,
        card=card(name, **changes),
        tokenizer=used,
        renderer=ChatRenderer(BYTES_TEMPLATE, used.special_tokens),
        engine=engine,
        created=1_700_000_000,
    )


@dataclass
class FixedDirectory:
    """Models by name; ``aliases`` map to names; ``pending`` names are registered and not ready, for a reason."""

    by_name: dict[str, ServedModel]
    aliases: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str | ModelStatus] = field(default_factory=dict)
    limits: dict[str, BusyThresholds] = field(default_factory=dict)
    ready: ModelStatus = field(default_factory=lambda: ModelStatus(True))

    def find(self, name: str) -> ServedModel:
        if name in self.pending:
            raise ModelNotReady(name, str(self.statuses()[name].reason))
        try:
            return self.by_name[self.aliases.get(name, name)]
        except KeyError:
            raise ModelNotFound(name) from None

    def models(self) -> Sequence[tuple[str, ServedModel]]:
        own = list(self.by_name.items())
        return own + [(alias, self.by_name[name]) for alias, name in self.aliases.items()]

    def statuses(self) -> Mapping[str, ModelStatus]:
        ready = {name: self.ready for name, _ in self.models()}
        return ready | {
            name: why if isinstance(why, ModelStatus) else ModelStatus(False, why) for name, why in self.pending.items()
        }

    def serves(self, family: Family) -> bool:
        return bool(self.pending) or any(family in model.families for model in self.by_name.values())

    def thresholds(self) -> Mapping[str, BusyThresholds]:
        return {name: self.limits.get(name, BusyThresholds()) for name in self.by_name}

    def primary_name(self, name: str) -> str:
        found = self.aliases.get(name, name)
        if found not in self.by_name and found not in self.pending:
            raise ModelNotFound(name)
        return found

    def set_thresholds(self, primary_name: str, thresholds: BusyThresholds) -> None:
        self.limits[primary_name] = thresholds


class FixedHealth:
    def report(self) -> Mapping[str, Any]:
        return {"log": {"state": "up"}}

    def dead_tasks(self) -> Sequence[DeadTask]:
        return ()


def application(
    *models: ServedModel,
    executor: Executor,
    config: FrontendConfig | None = None,
    registry: CollectorRegistry | None = None,
    paths: HttpPathsConfig | None = None,
    extensions: Sequence[FrontendRoute] = (),
    **directory: Any,
) -> FrontendApp:
    return build_app(
        config or FrontendConfig(http_host="127.0.0.1", http_port=0),
        FixedDirectory({model.name: model for model in models}, **directory),
        FixedHealth(),
        FrontendMetrics(registry or CollectorRegistry()),
        SystemClock(),
        executor,
        paths=paths,
        extensions=extensions,
    )
