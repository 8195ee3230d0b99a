"""Models that this process serves by itself, without a fleet: a ``ModelDirectory`` that is told what there is.

No I/O. Everything here belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal

from dynamo_es.background import DeadTask
from dynamo_es.frontend.contracts import TEXT, Family, ModelDirectory, ModelStatus, ServedModel, TokenEngine
from dynamo_es.frontend.errors import ModelNotFound
from dynamo_es.frontend.health import model_entry
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.frontend.traced_engine import TracedEngine
from dynamo_es.models.errors import ModelError
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.runtime.context import Context
from schemas.registry import REGISTRY, ModelCard

TextFamily = Literal["chat", "completions"]
"""What an engine that gets text can serve."""
_READY: Mapping[str, Any] = {
    "ready": True,
    "worker_types": {"aggregated": {"workers": 1, "needs": []}},
    "present": ["aggregated"],
    "missing_worker_types": [],
}


class LocalModels(ModelDirectory):
    """The models of this process; all of them are always ready, and none has workers that could be busy."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """``now_s``: Unix seconds."""
        self._now_s = now_s
        self._engines: dict[str, dict[TextFamily, TokenEngine]] = {}
        self._created: dict[str, int] = {}
        self._served: dict[str, ServedModel] = {}

    def add(self, family: TextFamily, name: str, engine: TokenEngine) -> None:
        """``engine`` answers ``family`` for the model ``name`` from now on. Raises ``ModelError`` if one does."""
        engines = self._engines.setdefault(name, {})
        if family in engines:
            raise ModelError(f"Model already exists: {name}")
        engines[family] = engine
        self._created.setdefault(name, int(self._now_s()))
        self._serve(name)

    def remove(self, family: TextFamily, name: str) -> None:
        """Nobody answers ``family`` for ``name`` any more; requests that run go on. Raises ``ModelError``."""
        engines = self._engines.get(name, {})
        if family not in engines:
            raise ModelError(f"Model not found: {name}")
        del engines[family]
        self._serve(name)

    def put(self, model: ServedModel) -> None:
        """Serve a model as it is given, in the place of one of its name."""
        self._served[model.name] = model

    def names(self, family: TextFamily) -> list[str]:
        """Models that an engine answers ``family`` for."""
        return [name for name, engines in self._engines.items() if family in engines]

    def _serve(self, name: str) -> None:
        engines = self._engines[name]
        if not engines:
            del self._engines[name], self._created[name], self._served[name]
            return
        # As their card would say it, in this order.
        types = [word for word, family in (("Chat", "chat"), ("Completions", "completions")) if family in engines]
        card = local_card(name, model_input=TEXT, model_type=" | ".join(types))
        engine = _ByFamily(dict(engines))
        self._served[name] = ServedModel(
            name, card, NoTokenizer(), None, TracedEngine(engine), self._created[name], as_written=True
        )  # fmt: skip

    def find(self, name: str) -> ServedModel:
        try:
            return self._served[name]
        except KeyError:
            raise ModelNotFound(name) from None

    def models(self) -> Sequence[tuple[str, ServedModel]]:
        return list(self._served.items())

    def statuses(self) -> Mapping[str, ModelStatus]:
        return {
            name: ModelStatus(ready=True, namespaces={f"__local_{family}_{name}": _READY for family in _order(model)})
            for name, model in self._served.items()
        }

    def serves(self, family: Family) -> bool:
        return family in ("chat", "completions")

    def primary_name(self, name: str) -> str:
        return self.find(name).name

    def thresholds(self) -> Mapping[str, BusyThresholds]:
        return {}

    def set_thresholds(self, primary_name: str, thresholds: BusyThresholds) -> None:
        raise ModelNotFound(primary_name)


class LocalHealth:
    """A ``HealthSource`` of a process that has no fleet."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    def report(self) -> Mapping[str, Any]:
        """As ``HealthSource.report``."""
        return {"models": {name: model_entry(status) for name, status in self._models.statuses().items()}}

    def dead_tasks(self) -> Sequence[DeadTask]:
        """As ``HealthSource.dead_tasks``: it has no such tasks."""
        return ()


class _ByFamily:
    """Whoever answers the family of a request; a ``TokenEngine``."""

    def __init__(self, engines: Mapping[TextFamily, TokenEngine]) -> None:
        self._engines = engines

    def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        return self._engines["chat" if "messages" in request else "completions"].generate(request, context)


def local_card(
    name: str, *, model_input: str, model_type: str, context_length: int = 0, block_size: int = 0
) -> ModelCard:
    """The card of a model that nobody registered."""
    return ModelCard(
        version=REGISTRY.version, namespace="", component="", endpoint="", instance_id=0, lease_id=0, suffix="",
        display_name=name, source_path="", model_input=model_input, model_type=model_type, worker_type="aggregated",
        needs=[], context_length=context_length, kv_cache_block_size=block_size,
    )  # fmt: skip


def _order(model: ServedModel) -> list[str]:
    return [family for family in ("chat", "completions") if family in model.families]
