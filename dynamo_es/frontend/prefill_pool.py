"""The workers that compute prompts for a model's workers, and the router to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from dynamo_es.errors import DynamoException
from dynamo_es.frontend.membership import EndpointPath, Membership, endpoint_of
from dynamo_es.router.request_router import RequestRouter
from schemas.registry import ModelCard

logger = logging.getLogger(__name__)
_PREFILL = "prefill"


class PrefillPool:
    """The prefill workers of one model. Belongs to one event loop.

    They are on one endpoint: it is kept while a worker there takes requests, then the one with most of them follows.
    Its router is built when the first request asks for it, and kept for when the endpoint comes back.
    """

    def __init__(
        self,
        membership: Callable[[], Membership],
        is_serving: Callable[[ModelCard], bool],
        build: Callable[[EndpointPath, Callable[[int], bool]], Awaitable[RequestRouter]],
    ) -> None:
        """``membership`` gives the model's workers; another object each time when something changed. ``build`` makes
        the router of an endpoint, over the instances that the given function accepts.
        """
        self._membership = membership
        self._is_serving = is_serving
        self._build = build
        self._seen: Membership | None = None
        self._endpoint: EndpointPath | None = None
        self._members: Mapping[int, ModelCard] = {}
        self._left_out: frozenset[int] = frozenset()
        self._routers: dict[EndpointPath, asyncio.Future[RequestRouter]] = {}

    def needed(self) -> bool:
        """Whether the model's workers said that they cannot do without prefill workers."""
        cards = self._membership().members.values()
        return any(card.needs and all(_PREFILL in alternative for alternative in card.needs) for card in cards)

    def wanted(self) -> bool:
        """Whether the model's workers generate for prompts that others compute."""
        return self._membership().card.worker_type == "decode"

    async def router(self) -> RequestRouter | None:
        """The router to the prefill workers; None: there are none, or it cannot be built just now (logged)."""
        self._settle()
        if not self._members or self._endpoint is None:
            return None
        endpoint = self._endpoint
        building = self._routers.get(endpoint)
        if building is None:
            building = self._routers[endpoint] = asyncio.ensure_future(self._build(endpoint, self._accepts))
        try:
            # A request that is given up must not take the router from the others that wait for it.
            return building.result() if building.done() else await asyncio.shield(building)
        except DynamoException as error:
            self._routers.pop(endpoint, None)
            logger.error("no router for the prefill workers of %s: %s", ".".join(endpoint), error)
            return None

    def built(self) -> RequestRouter | None:
        """The router if there is one now; for metrics."""
        building = self._routers.get(self._endpoint) if self._endpoint is not None else None
        if building is None or not building.done() or building.cancelled() or building.exception() is not None:
            return None
        return building.result()

    def _accepts(self, worker_id: int) -> bool:
        self._settle()
        return worker_id in self._members

    def _settle(self) -> None:
        membership = self._membership()
        if membership is self._seen:
            return
        self._seen = membership
        groups: dict[EndpointPath, dict[int, ModelCard]] = {}
        for worker_id, card in membership.helpers.items():
            if card.worker_type == _PREFILL and self._is_serving(card):
                groups.setdefault(endpoint_of(card), {})[worker_id] = card
        if not self.wanted() or not groups:
            self._members = {}
            return
        if self._endpoint not in groups:
            self._endpoint = min(groups, key=lambda path: (-len(groups[path]), path))
        self._members = groups[self._endpoint]
        left_out = frozenset(id_ for group in groups.values() for id_ in group) - self._members.keys()
        for worker_id in left_out - self._left_out:
            logger.error(
                "prefill worker %d is not used: it is on another endpoint than %s, where the model's others are",
                worker_id, ".".join(self._endpoint),
            )  # fmt: skip
        self._left_out = left_out
