"""The part of an engine of this process in the traces of requests: a hop without a choice of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from dynamo_es.errors import Cancelled
from dynamo_es.frontend.contracts import TokenEngine
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.tracing import Attribute, HopTracer

_FACTS: Mapping[str, Attribute] = {"dynamo.router_mode": "in-process"}


class TracedEngine:
    """A ``TokenEngine`` over another one, which sees the trace that it is in by its context."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        """See ``TokenEngine``."""
        hops = context.hops
        return self._engine.generate(request, context) if hops is None else self._told(request, context, hops)

    async def _told(
        self, request: dict[str, Any], context: Context, hops: HopTracer
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        hop = hops.deciding("", 1)
        # What the engine calls is below the hop.
        context.trace = hop.dispatched(lambda: _FACTS)
        outcome, detail, begun = "cancelled", "", False
        try:
            async with aclosing(self._engine.generate(request, context)) as batches:
                async for batch in batches:
                    if not begun:
                        begun = True
                        hop.answered()
                    yield batch
            outcome, detail = context.conclusion or ("cancelled" if context.is_stopped() else "ok", "")
        except Cancelled:
            raise
        except Exception as error:
            outcome, detail = "error", type(error).__name__
            raise
        finally:
            hop.ended(outcome, detail)
