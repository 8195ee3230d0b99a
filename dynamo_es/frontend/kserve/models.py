"""What the KServe service answers with: models of this process, or those of a fleet. No gRPC here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_es.frontend.in_process import ENVELOPE
from dynamo_es.frontend.python_engine import PythonAsyncEngine
from dynamo_es.models.errors import ModelError
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.faults import backend_error


class FrameEngine(Protocol):
    """Answers a request with frames: tensors, or chunks of a completion."""

    def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[Any, None]:
        """Frames one by one; closing it ends the request. Raises ``EngineFault``."""


class EngineFault(Exception):
    """The engine failed; the text is the client's."""


@dataclass(frozen=True, slots=True)
class TensorModel:
    """A tensor model. ``config``: its inputs and outputs, as ``check_tensor_config`` takes them; None: not told."""

    engine: FrameEngine
    config: Mapping[str, Any] | None


class KserveModels(Protocol):
    """The models that are there now. Belongs to one event loop; nothing here blocks."""

    def tensor(self, name: str) -> TensorModel | None:
        """A tensor model; None: there is none of this name."""

    def completions(self, name: str) -> FrameEngine | None:
        """Who completes texts for a model; None: nobody does."""

    def config(self, name: str) -> Mapping[str, Any] | None:
        """Inputs and outputs of a model that tells them."""

    def is_ready(self, name: str) -> bool:
        """Whether it can be asked. False for one that is not known."""


class OwnModels(KserveModels):
    """Models of this process, by kind. All refusals are ``ModelError``, with Dynamo's texts."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorModel] = {}
        self._texts: dict[str, dict[str, PythonAsyncEngine]] = {"completions": {}, "chat": {}}

    def add_tensor(self, name: str, engine: PythonAsyncEngine, config: Mapping[str, Any] | None) -> None:
        """Raises: it is there already."""
        self._check_new(self._tensors, name)
        self._tensors[name] = TensorModel(PythonFrames(engine), config)

    def add_text(self, kind: str, name: str, engine: PythonAsyncEngine) -> None:
        """``kind``: ``completions`` or ``chat``. Raises: it is there already."""
        self._check_new(self._texts[kind], name)
        self._texts[kind][name] = engine

    def remove(self, kind: str, name: str) -> None:
        """``kind``: one of the above, or ``tensor``. Raises: there is none."""
        known: dict[str, Any] = self._tensors if kind == "tensor" else self._texts[kind]
        if name not in known:
            raise ModelError(f"Model not found: {name}")
        del known[name]

    def names(self, kind: str) -> list[str]:
        """Names in the order in which they came."""
        return list(self._tensors if kind == "tensor" else self._texts[kind])

    def tensor(self, name: str) -> TensorModel | None:
        return self._tensors.get(name)

    def completions(self, name: str) -> FrameEngine | None:
        engine = self._texts["completions"].get(name)
        return None if engine is None else PythonFrames(engine)

    def config(self, name: str) -> Mapping[str, Any] | None:
        model = self._tensors.get(name)
        return None if model is None else model.config

    def is_ready(self, name: str) -> bool:
        return name in self._tensors or any(name in known for known in self._texts.values())

    @staticmethod
    def _check_new(known: Mapping[str, Any], name: str) -> None:
        if name in known:
            raise ModelError(f"Model already exists: {name}")


class PythonFrames:
    """A ``FrameEngine`` over a Python engine. Envelopes are opened; those without ``data`` are skipped."""

    def __init__(self, engine: PythonAsyncEngine) -> None:
        self._engine = engine

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[Any, None]:
        """See ``FrameEngine``."""
        items: Any = None
        try:
            items = self._engine.generate(request, context=context)
            async for item in items:
                if not isinstance(item, Mapping) or not item.get(ENVELOPE):
                    yield item
                elif item.get("error") is not None or item.get("event") == "error":
                    raise EngineFault("; ".join(map(str, item.get("comment") or ())) or "the engine failed")
                elif item.get("data") is not None:
                    yield item["data"]
        except (EngineFault, GeneratorExit):
            raise
        except Exception as error:
            raise EngineFault(str(backend_error(error))) from error
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()
