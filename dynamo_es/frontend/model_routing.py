"""How one model is routed now, as ``/health`` tells it. Reads routers and views; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dynamo_es.frontend.contracts import TEXT
from dynamo_es.frontend.membership import Membership
from dynamo_es.frontend.servable import generates
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_report import MAX_LISTED_RANKS, IndexKind, RoutingReport, count_ranks, rank_reports
from schemas.registry import ModelCard, ResyncAsked
from streams.kv_index_state import KvIndexState

_PREFILL = "prefill"


def model_routing(
    name: str,
    membership: Membership,
    is_serving: Callable[[ModelCard], bool],
    routers: Sequence[RequestRouter],
    block_size: int,
    index: KvIndexState | None,
    resyncs: Mapping[bytes, ResyncAsked],
) -> RoutingReport:
    """The report of a model with at least one router, the first of them to the workers that answer.

    Args:
        name: Under which its KV events stand.
        membership: Its workers. Where others compute their prompts, those have the caches that matter.
        is_serving: Whether a card's worker takes requests.
        routers: To all of its workers.
        block_size: Of its routers.
        index: None: this process keeps none.
        resyncs: Open questions to sources, by record key.
    """
    card, decisions = membership.card, Counter[str]()
    for router in routers:
        decisions.update(router.counters.decisions)
    report = RoutingReport(
        mode=routers[0].chooser.mode,
        takes_text=card.model_input == TEXT,
        generates=generates(card),
        block_size=block_size,
        index=_index_kind(routers[0]),
        overlap_credit=_credit(routers[0]),
        decisions=dict(decisions),
        queried_blocks=sum(router.counters.queried_blocks for router in routers),
        matched_blocks=sum(router.counters.matched_blocks for router in routers),
        selected_blocks=sum(router.counters.selected_blocks for router in routers),
    )
    if index is not None and report.generates:
        helpers = [helper for helper in membership.helpers.values() if helper.worker_type == _PREFILL]
        computing = [card for card in helpers or membership.members.values() if is_serving(card)]
        ranks = rank_reports(name, computing, block_size, index, resyncs)
        report.ranks = count_ranks(ranks)
        report.untrusted = [rank for rank in ranks if rank.state != "exact"][:MAX_LISTED_RANKS]
    return report


def _index_kind(router: RequestRouter) -> IndexKind:
    chooser = router.chooser
    if not isinstance(chooser, KvChooser):
        return "none"
    if chooser.is_remote:
        return "remote"
    if chooser.settings.use_kv_events:
        return "own"
    return "none" if chooser.approximate is None else "approximate"


def _credit(router: RequestRouter) -> float:
    return router.chooser.settings.overlap_score_credit if isinstance(router.chooser, KvChooser) else 0.0
