"""Why requests are not routed by cache: rules from facts to causes, each with what to do. Pure.

The rules go from the outside in, as an engineer would look: can the frontend see anything (log, folds), does it route
the model by cache at all (readiness, mode, settings), does it know the workers' caches (events, block sizes,
versions), and what did recent prompts have in common with them. What prompts are like is a fault only where next to
nothing is found of them in caches (``_WORKING_SHARE``); otherwise it is told beside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from dynamo_es.diagnosis.facts import Facts, HealthPage, LoggedModel, ModelHealth, total
from dynamo_es.router.decision_reasons import (
    EQUAL_OVERLAP,
    KV_REASONS,
    LOAD_OVER_OVERLAP,
    NO_EVENTS,
    NO_OVERLAP,
    OVERLAP,
    PROMPT_UNDER_ONE_BLOCK,
)
from dynamo_es.router.routing_report import RankReport, RoutingReport

_WORKING_SHARE = 0.1
"""Above this share of decisions that found their prompts in caches, routing by cache works."""
_BEHIND_RECORDS = 1_000
"""A view that is no further behind than this is taken for current."""
_SHOWN = 5


Code = Literal[
    "frontend-away", "frontend-not-ready", "log-unreadable", "no-workers", "no-model", "not-at-frontend",
    "log-away", "fold-stalled", "fold-behind", "fold-not-live", "index-partitions-missing", "view-behind",
    "tokenizer-not-loaded", "not-ready", "worker-refused",
    "mode-not-kv", "credit-zero", "events-disabled", "workers-take-text",
    "no-events", "events-missing", "events-under-other-model", "caches-empty", "block-size-mismatch", "hash-version",
    "prompts-short", "no-overlap", "load-over-overlap",
]  # fmt: skip
"""What docker/RUNBOOK.md explains."""


class Cause(msgspec.Struct, omit_defaults=True):
    """One line of a diagnosis.

    Attributes:
        code: What it is.
        model: Of which model; empty: of all.
        what: What is the case, with the values that show it.
        do: What to do.
        workers: Ids of the workers that it is about, if it is about some; at most some of them.
    """

    code: Code
    model: str
    what: str
    do: str
    workers: list[int] = []


class ModelDiagnosis(msgspec.Struct):
    """One model: whether its requests are routed by cache, in one line, and every reason against."""

    model: str
    by_cache: bool
    summary: str
    causes: list[Cause]


class Diagnosis(msgspec.Struct):
    """Everything; ``causes`` are those of all models."""

    healthy: bool
    causes: list[Cause]
    models: list[ModelDiagnosis]


def diagnose(facts: Facts, only: str | None = None) -> Diagnosis:
    """What the facts come to; ``only``: of this model."""
    general = list(_general(facts))
    pages = (facts.frontend.models or {}) if facts.frontend is not None else {}
    logged = facts.log.models if facts.log is not None else {}
    if only in pages:
        only = pages[only].routed_as or only
    # Other names of a model are routed as it is.
    others = {name for name, page in pages.items() if page.routed_as is not None and page.ready}
    names = [name for name in dict.fromkeys([*pages, *logged]) if name not in others and only in (None, name)]
    if not names and (facts.frontend is None or facts.frontend.stage is None):
        general.append(_no_models(facts, only))
    models = [_model(facts, name, pages.get(name), logged.get(name)) for name in names]
    healthy = not general and all(not model.causes for model in models)
    return Diagnosis(healthy, general, models)


def _general(facts: Facts) -> Iterator[Cause]:
    if facts.frontend_problem:
        yield Cause(
            "frontend-away", "", facts.frontend_problem,
            "see that the frontend runs and that the address is right (runbook: DynamoEsProcessDown)",
        )  # fmt: skip
    if facts.log_problem:
        yield Cause(
            "log-unreadable", "", f"this command cannot read the log: {facts.log_problem}",
            "try from a machine of the fleet; if it fails there, too, bring the log back (runbook: DynamoEsLogAway)",
        )  # fmt: skip
    if facts.frontend is not None:
        yield from _log_and_folds(facts.frontend)
    yield from _other_versions(facts)


def _log_and_folds(page: HealthPage) -> Iterator[Cause]:
    if page.stage is not None and not page.stalled:
        yield Cause(
            "frontend-not-ready", "", f"the frontend takes no requests now ({page.stage}): {page.message}",
            "wait until it is ready, or ask another one",
        )  # fmt: skip
    if page.log is not None and page.log.state != "ok":
        yield Cause(
            "log-away", "", f"the frontend's log is {page.log.state}: {page.log.reason or 'no reason given'}; it "
            "routes by the last view of caches that it had",
            "bring the log back; views become exact by themselves (runbook: DynamoEsLogAway, DynamoEsLogDegraded)",
        )  # fmt: skip
    for stall in page.stalled[:_SHOWN]:
        yield Cause(
            "fold-stalled", "", str(stall),
            "restart the frontend; if it stands there again, keep that record (runbook: DynamoEsFoldStalled)",
        )  # fmt: skip
    stalled = {stall.fold for stall in page.stalled}
    for name, view in page.views.items():
        if name in stalled:
            continue
        if view.state != "live":
            percent = "" if view.progress_percent is None else f", {view.progress_percent:g} % of its start done"
            yield Cause(
                "fold-not-live", "", f"view {name} is {view.state}{percent}, {view.lag_records} records behind",
                "while it starts, wait; if the share does not rise, look at the frontend's log messages",
            )  # fmt: skip
        elif view.lag_records > _BEHIND_RECORDS:
            yield Cause(
                "fold-behind", "", f"view {name} is {view.lag_records} records behind: it shows what was true before",
                "give the frontend a core of its own (runbook: DynamoEsLagGrowing)",
            )  # fmt: skip
    if page.remote_index is not None and page.remote_index.missing_partitions:
        numbers = ", ".join(map(str, page.remote_index.missing_partitions[:_SHOWN]))
        yield Cause(
            "index-partitions-missing", "", f"no indexer answers for partition(s) {numbers} of kv-events",
            "start the indexers that are missing (runbook: DynamoEsIndexPartitionsMissing)",
        )  # fmt: skip


def _other_versions(facts: Facts) -> Iterator[Cause]:
    sources = facts.log.unknown_versions if facts.log is not None else {}
    seen = facts.frontend.refused_records.get("kv-events", {}).get("unknown_version", 0) if facts.frontend else 0
    if not sources and not seen:
        return
    named = ", ".join(f"{name} ({count})" for name, count in list(sources.items())[:_SHOWN])
    yield Cause(
        "hash-version", "",
        f"KV events of another version, which means other block hashes, were refused: {named or f'{seen} records'}",
        "run routers and workers of the same release: update readers first (dynamo-es dead-letters list --topic "
        "kv-events --reason unknown_version)",
    )  # fmt: skip


def _no_models(facts: Facts, only: str | None) -> Cause:
    if only is not None:
        return Cause("no-model", only, "no worker has registered it", "compare the name with GET /v1/models")
    seen = "the frontend" if facts.frontend is not None else "the log"
    return Cause(
        "no-workers", "", f"{seen} knows of no model",
        "see that workers run on the same --log and --topic-namespace (runbook: DynamoEsNoWorkers)",
    )  # fmt: skip


def _model(facts: Facts, name: str, page: ModelHealth | None, logged: LoggedModel | None) -> ModelDiagnosis:
    causes: list[Cause] = []
    routing, where, others = _decided(facts, page, logged)
    if page is not None:
        causes += _readiness(name, page)
    elif facts.frontend is not None:
        causes.append(
            Cause("not-at-frontend", name, "the log has workers of it, the frontend does not know it",
                  "compare --log, --topic-namespace and --namespace of frontend and workers")
        )  # fmt: skip
    if routing is None:
        own = page is not None and page.ready
        return ModelDiagnosis(name, False, "the frontend's own process answers" if own else "not routed", causes)
    if not routing.generates and not routing.takes_text:
        return ModelDiagnosis(name, False, "its workers keep no KV cache (embeddings): requests go by load", causes)
    causes += _settings(name, routing)
    by_settings = not any(cause.code in _NOT_BY_CACHE for cause in causes)
    if by_settings and routing.index != "approximate":
        causes += _caches(name, routing, None if facts.frontend is None else logged)
    traffic, beside = _traffic(name, routing, where, told={cause.code for cause in causes})
    causes += traffic if by_settings else []
    count = total(routing.decisions) + total(others)
    for mode, decisions in others.items():
        if facts.frontend is not None:
            beside.append(f"beside them {decisions} decisions in mode {mode} since {facts.since}, by other routers")
        elif decisions >= _WORKING_SHARE * count:
            causes.append(
                Cause("mode-not-kv", name, f"{decisions} of {count} decisions {where} were made in mode {mode}",
                      "start all frontends of the fleet with the same --router-mode; to see which, ask each with --url")
            )  # fmt: skip
    summary = _summary(routing, where)
    return ModelDiagnosis(name, by_settings and not causes, "; ".join([summary, *beside]), causes)


def _decided(
    facts: Facts, page: ModelHealth | None, logged: LoggedModel | None
) -> tuple[RoutingReport | None, str, Mapping[str, int]]:
    """What is known of the decisions in the mode in question, of which time, and those in other modes (the log's)."""
    own = page.routing if page is not None else None
    since_start = "since the frontend started"
    if logged is None or (own is None and facts.frontend is not None):
        return own, since_start, {}
    recent = logged.routing
    by_mode: dict[str, dict[str, int]] = {}
    for reason, decisions in recent.decisions.items():
        by_mode.setdefault("kv" if reason in KV_REASONS else reason, {})[reason] = decisions
    # Several routers may write to one log: by cache is what is asked for, whoever was the last.
    mode = own.mode if own is not None else "kv" if "kv" in by_mode else recent.mode
    counted = by_mode.pop(mode, {})
    others = {name: total(decisions) for name, decisions in by_mode.items()}
    if own is None:
        return msgspec.structs.replace(recent, mode=mode, decisions=counted), f"since {facts.since}", others
    if not counted:
        return own, since_start, others
    # What all routers did lately says more than what this one did in its life.
    routing = msgspec.structs.replace(
        own, decisions=counted, queried_blocks=recent.queried_blocks, matched_blocks=recent.matched_blocks,
        selected_blocks=recent.selected_blocks,
    )  # fmt: skip
    return routing, f"since {facts.since}, at all routers{f' in mode {mode}' if others else ''}", others


def _readiness(name: str, page: ModelHealth) -> Iterator[Cause]:
    if not page.ready:
        reason = page.reason or "no reason given"
        if page.routing is None and reason.startswith(("not loaded", "its tokenizer")):
            yield Cause(
                "tokenizer-not-loaded", name, f"no request is routed: {reason}",
                "make the files that its workers registered readable at the frontend, or give it --model-path "
                "(runbook: DynamoEsModelNotReady)",
            )  # fmt: skip
        else:
            yield Cause(
                "not-ready", name, f"no request is routed: {reason}",
                f"start the workers that are missing: GET /v1/models/{name}/ready (runbook: DynamoEsModelNotReady)",
            )  # fmt: skip
    if page.refused_workers is not None:
        for worker in page.refused_workers.workers[:_SHOWN]:
            yield Cause(
                "worker-refused", name, f"worker {worker.instance_id} gets nothing: {worker.reason}", worker.remedy,
                [worker.instance_id],
            )  # fmt: skip


_UNKNOWN_CACHES: frozenset[Code] = frozenset(
    {"no-events", "events-missing", "events-under-other-model", "block-size-mismatch", "view-behind"}
)
_NOT_BY_CACHE = frozenset({"mode-not-kv", "workers-take-text", "events-disabled", "credit-zero"})


def _settings(name: str, routing: RoutingReport) -> Iterator[Cause]:
    """Why the model is not routed by cache by intention; the first that applies hides the others."""
    if routing.takes_text:
        yield Cause(
            "workers-take-text", name, "its workers take text, so that no prompt is tokenized: requests go by load",
            "attached servers: give worker attach --model-path, and see that the server takes token ids",
        )  # fmt: skip
    elif routing.mode not in ("kv", ""):
        yield Cause(
            "mode-not-kv", name, f"the router mode is {routing.mode}", "start the frontend with --router-mode kv (or "
            "look at the router_config that its workers registered)",
        )  # fmt: skip
    elif not routing.overlap_credit and routing.mode == "kv":
        yield Cause(
            "credit-zero", name, "the overlap credit is 0: caches count for nothing",
            "raise --router-kv-overlap-score-credit (1 by default)",
        )  # fmt: skip
    elif routing.mode == "kv" and (routing.index == "none" or (routing.index == "approximate" and not _works(routing))):
        how = "by what was sent where before" if routing.index == "approximate" else "by load"
        yield Cause(
            "events-disabled", name, f"KV events are not used: requests go {how}",
            "start the frontend with --router-kv-events, workers with KV events",
        )  # fmt: skip


def _caches(name: str, routing: RoutingReport, logged: LoggedModel | None) -> Iterator[Cause]:
    """What is not known of the workers' caches."""
    counts = routing.ranks
    if counts is None:
        return
    exact_in_log = {} if logged is None else {(r.worker_id, r.dp_rank): r for r in logged.ranks if r.state == "exact"}
    behind = [rank for rank in routing.untrusted if (rank.worker_id, rank.dp_rank) in exact_in_log]
    if behind:
        yield Cause(
            "view-behind", name, f"the log has all KV events of {_ranks(behind)}, the frontend does not",
            "if it stays so, the frontend's index does not get on: see views in /health, and that it reads this log",
            _ids(behind),
        )  # fmt: skip
    known = {(rank.worker_id, rank.dp_rank) for rank in behind}
    left = [rank for rank in routing.untrusted if (rank.worker_id, rank.dp_rank) not in known]
    for rank in [rank for rank in left if rank.state == "other-block-size"][:_SHOWN]:
        yield Cause(
            "block-size-mismatch", name, f"worker {rank.worker_id} has KV blocks of {rank.block_size} tokens, the "
            f"router's are of {routing.block_size}: its cache earns no credit",
            f"start it with --block-size {routing.block_size}, or the frontend with --kv-cache-block-size",
            _ids([rank]),
        )  # fmt: skip
    degraded = [rank for rank in left if rank.state == "degraded"]
    if degraded:
        asked = max(rank.asked for rank in degraded)
        unanswered = f"; asked {asked} time(s) to announce it again, no answer" if asked else ""
        yield Cause(
            "events-missing", name, f"KV events of {counts.degraded} of {counts.total} ranks are incomplete, so that "
            f"their caches count as empty: {_ranks(degraded)}{unanswered}",
            "within 30 s it should mend itself; else restart those workers (runbook: DynamoEsSourcesDegraded)",
            _ids(degraded),
        )  # fmt: skip
    yield from _silent(name, routing, [rank for rank in left if rank.state in ("silent", "retired")])
    if counts.empty and routing.queried_blocks and not counts.exact - counts.empty:
        yield Cause(
            "caches-empty", name, f"all {counts.exact} ranks whose events are complete say that they hold no block",
            "see that prefix caching is on in the engine, and that its cache is larger than a few prompts",
        )  # fmt: skip


def _silent(name: str, routing: RoutingReport, silent: Sequence[RankReport]) -> Iterator[Cause]:
    counts = routing.ranks
    renamed = [rank for rank in silent if rank.other_model]
    if renamed:
        yield Cause(
            "events-under-other-model", name, f"KV events of {_ranks(renamed)} stand under model "
            f"{renamed[0].other_model}", "publish them under the name that the model's card has", _ids(renamed),
        )  # fmt: skip
    silent = [rank for rank in silent if not rank.other_model]
    if silent and counts is not None:
        yield Cause(
            "no-events", name, f"no KV events of {counts.silent + counts.retired - len(renamed)} of {counts.total} "
            f"ranks were ever seen: {_ranks(silent)}",
            "see that the engine publishes them (vLLM: --kv-events-config; worker attach: --kv-events; prefix caching "
            "on), and that the worker may write to kv-events; for engines that have none (llama.cpp) start frontends "
            "with --no-router-kv-events",
            _ids(silent),
        )  # fmt: skip


def _works(routing: RoutingReport) -> bool:
    """Whether a fair part of the decisions found their prompts in caches, be it alike in all of them."""
    count = sum(routing.decisions.get(reason, 0) for reason in KV_REASONS)
    found = routing.decisions.get(OVERLAP, 0) + routing.decisions.get(EQUAL_OVERLAP, 0)
    return count > 0 and found >= _WORKING_SHARE * count


def _traffic(name: str, routing: RoutingReport, where: str, told: Collection[Code]) -> tuple[list[Cause], list[str]]:
    """Causes in what prompts are like, and what is only worth a word. ``told``: the causes that are known already."""
    kv = {reason: routing.decisions.get(reason, 0) for reason in KV_REASONS}
    count = total(kv)
    if not count:
        return [], []
    texts: dict[str, tuple[Code, str, str]] = {
        NO_EVENTS: (
            "no-events", ": no worker's cache was known",
            "if all ranks are exact now, that was before: ask again in a while; else see that workers publish KV "
            "events, and that the indexers answer, if frontends ask some (runbook: DynamoEsCacheRoutingBlind)",
        ),
        PROMPT_UNDER_ONE_BLOCK: (
            "prompts-short", f": prompts are shorter than one block ({routing.block_size} tokens)",
            "nothing can be shared there; a smaller block size of engine and router shares shorter beginnings",
        ),
        LOAD_OVER_OVERLAP: (
            "load-over-overlap", " went to a less loaded worker although another one had more of the prompt",
            "more workers, or a higher --router-kv-overlap-score-credit",
        ),
        NO_OVERLAP: (
            "no-overlap", ": prompts begin with nothing that any worker has cached",
            "new prompts are no fault; if clients do repeat themselves, look for what changes at the beginning "
            "(dates, ids), for evictions, and for a --model-path with another tokenizer or template than the workers'",
        ),
    }  # fmt: skip
    works = _works(routing)
    if routing.ranks is not None and not routing.ranks.exact:
        del texts[NO_OVERLAP]  # follows from what is not known of the caches
    if not _UNKNOWN_CACHES.isdisjoint(told):
        del texts[NO_EVENTS]  # likewise
    causes, beside = [], []
    if kv[EQUAL_OVERLAP] >= _WORKING_SHARE * count:
        # No fault: all share one long beginning (a system prompt), and what follows it is new to all.
        beside.append(
            f"{kv[EQUAL_OVERLAP]} of {count} found the same overlap at every worker, so that load decided "
            f"({EQUAL_OVERLAP})"
        )
    for reason, (code, what, remedy) in texts.items():
        if kv[reason] >= _WORKING_SHARE * count:
            if works:
                beside.append(f"{kv[reason]} {code}")
            else:
                causes.append(Cause(code, name, f"{kv[reason]} of {count} decisions {where}{what}", remedy))
    return causes, beside


def _summary(routing: RoutingReport, where: str) -> str:
    parts = [f"mode {routing.mode or 'unknown (no decision in the log)'}"]
    if routing.index == "approximate":
        parts.append("caches are assumed from what was sent where")
    elif routing.ranks is not None:
        parts.append(f"{routing.ranks.exact} of {routing.ranks.total} ranks exact")
    count = total(routing.decisions)
    if not count:
        parts.append(f"no decision {where}")
    elif routing.mode == "kv":
        parts.append(f"{routing.decisions.get(OVERLAP, 0)} of {count} decisions by overlap {where}")
        if routing.queried_blocks:
            parts.append(
                f"of {routing.queried_blocks} prompt blocks the best worker had {routing.matched_blocks}, the chosen "
                f"one {routing.selected_blocks}"
            )
    else:
        parts.append(f"{count} decisions {where}")
    return ", ".join(parts)


def _ranks(ranks: Sequence[RankReport]) -> str:
    shown = ", ".join(f"worker {rank.worker_id} rank {rank.dp_rank}" for rank in ranks[:_SHOWN])
    return f"{shown}, …" if len(ranks) > _SHOWN else shown


def _ids(ranks: Sequence[RankReport]) -> list[int]:
    return list(dict.fromkeys(rank.worker_id for rank in ranks))[:_SHOWN]
