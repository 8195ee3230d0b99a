"""What a server's Prometheus page says of its load, whatever engine it is. Pure.

Names are those of vLLM (``vllm:…``), SGLang (``sglang:…``) and llama.cpp's server (``llamacpp:…``); a page without
any of them says nothing. What llama.cpp's says of its cache is in its ``/slots`` since 2025.

A page is another process's word, and is read on the loop that serves requests: what is no amount (negative, not finite,
too large) says nothing, a series counts once, and only the series that matter are parsed, at most ``MAX_SERIES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from dynamo_es.errors import Unknown

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
# Fractions of the cache that are in use, 0 to 1.
_USAGE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
_USED_TOKENS = ("sglang:num_used_tokens", "llamacpp:kv_cache_tokens")
_TOTAL_TOKENS = ("sglang:max_total_num_tokens",)
_INFO = "vllm:cache_config_info"
_SGLANG_INFO = "sglang:cache_config_info"
_STARTED = "process_start_time_seconds"
_RANK_LABELS = ("engine", "dp_rank")
_MAX_RANKS = 1024
MAX_SERIES = 8192
"""Of a page; those behind them are passed over."""
_MOST = 2**53
"""Beyond it a float is no exact count, and no server has as many of anything."""
_MOST_TOKENS_A_BLOCK = 2**20


@dataclass(slots=True)
class RankPage:
    """What a page says of one data-parallel rank; None: nothing."""

    running: float | None = None
    waiting: float | None = None
    usage: float | None = None
    used_tokens: float | None = None
    total_tokens: float | None = None
    total_blocks: int | None = None


@dataclass(slots=True)
class MetricsPage:
    """A page.

    Attributes:
        ranks: By number.
        block_size: Tokens a block; None: not said.
        started_at: When the server's process began, Unix seconds; None: not said.
        of_llamacpp: It is llama.cpp's.
    """

    ranks: dict[int, RankPage] = field(default_factory=dict)
    block_size: int | None = None
    started_at: float | None = None
    of_llamacpp: bool = False

    def total_blocks(self, block_size: int | None) -> int | None:
        """Blocks of the first rank's cache. ``block_size``: if the page has none."""
        first = self.ranks.get(min(self.ranks, default=0))
        return None if first is None else _total_blocks(first, self.block_size or block_size)

    @property
    def wants_slots(self) -> bool:
        """Whether its cache is told by ``/slots`` only."""
        first = self.ranks.get(0)
        return self.of_llamacpp and first is not None and first.used_tokens is None and first.usage is None


class RankLoad(NamedTuple):
    """Load of a rank in the terms of ``WorkerMetricsPublisher``."""

    kv_used_blocks: int
    total_kv_blocks: int | None
    running: int | None
    waiting: int | None


def read_page(text: str) -> MetricsPage:
    """The page. Raises ``Unknown``: it is not in Prometheus's text form."""
    page, seen = MetricsPage(), set[tuple[str, frozenset[tuple[str, str]]]]()
    lines = text.split("\n")
    # Of a page that has none of them one is read all the same: it may be no page.
    wanted = list(islice((line for line in lines if line.startswith(_READ)), MAX_SERIES)) or _first(lines)
    try:
        for family in text_string_to_metric_families("\n".join(wanted)):
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                if (series not in seen or sample.name == _STARTED) and 0 <= sample.value <= _MOST:
                    _take(page, sample.name, sample.labels, sample.value)
                seen.add(series)
    except (ValueError, KeyError, IndexError) as error:
        raise Unknown("the upstream's /metrics cannot be read") from error
    return page


def _first(lines: Iterable[str]) -> list[str]:
    return list(islice((line for line in lines if line.strip() and not line.startswith("#")), 1))


def take_slots(page: MetricsPage, slots: Any) -> None:
    """Add what llama.cpp's ``/slots`` (decoded JSON) says of the cache: tokens of running requests, and of all slots.

    What has another form says nothing.
    """
    rows = [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []
    sizes: list[Any] = [slot.get("n_ctx") for slot in rows]
    used: list[Any] = [slot.get("n_prompt_tokens") for slot in rows if slot.get("is_processing") is True]
    numbers = [*sizes, *used]
    if rows and all(isinstance(number, int) and number >= 0 for number in numbers) and sum(numbers) <= _MOST:
        said = page.ranks.setdefault(0, RankPage())
        said.used_tokens, said.total_tokens = float(sum(used)), float(sum(sizes))


def loads_of(page: MetricsPage, block_size: int | None) -> dict[int, RankLoad]:
    """Load by rank; ranks whose cache the page says nothing of are left out. ``block_size``: if the page has none."""
    size = page.block_size or block_size
    found = {}
    for rank, said in page.ranks.items():
        total = _total_blocks(said, size)
        used = _used_blocks(said, size, total)
        if used is not None:
            found[rank] = RankLoad(used, total, _count(said.running), _count(said.waiting))
    return found


def _total_blocks(said: RankPage, size: int | None) -> int | None:
    if said.total_blocks is not None:
        return said.total_blocks
    return int(said.total_tokens // size) if said.total_tokens is not None and size else None


def _used_blocks(said: RankPage, size: int | None, total: int | None) -> int | None:
    if said.used_tokens is not None and size:
        return -(-int(said.used_tokens) // size)
    if said.usage is not None and total is not None:
        return round(min(said.usage, 1.0) * total)
    return None


def _count(value: float | None) -> int | None:
    return None if value is None or value > _MOST else int(value)  # sums may be more than what is summed


def _take(page: MetricsPage, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == _STARTED:
        # Of several the youngest, in whatever order they come.
        page.started_at = max(value, page.started_at or 0.0)
        return
    page.of_llamacpp |= name.startswith("llamacpp:")
    rank = _rank(labels)
    if rank is None or (rank not in page.ranks and len(page.ranks) >= _MAX_RANKS):
        return
    if name in (_INFO, _SGLANG_INFO):
        size = _positive(labels.get("block_size") or labels.get("page_size"))
        if size is not None and size <= _MOST_TOKENS_A_BLOCK:
            page.block_size = size
        blocks = _positive(labels.get("num_gpu_blocks") or labels.get("num_pages"))
        page.ranks.setdefault(rank, RankPage()).total_blocks = blocks
        return
    for names, member in _MEMBERS:
        if name in names:
            said = page.ranks.setdefault(rank, RankPage())
            # Several models or adapters of one engine: requests add up, the cache is one.
            before = getattr(said, member) if member in ("running", "waiting") else None
            setattr(said, member, value if before is None else before + value)


_MEMBERS = (
    (_RUNNING, "running"), (_WAITING, "waiting"), (_USAGE, "usage"), (_USED_TOKENS, "used_tokens"),
    (_TOTAL_TOKENS, "total_tokens"),
)  # fmt: skip


_READ = (*(name for names, _ in _MEMBERS for name in names), _INFO, _SGLANG_INFO, _STARTED, "llamacpp:")


def _rank(labels: Mapping[str, str]) -> int | None:
    for label in _RANK_LABELS:
        text = labels.get(label)
        if text:
            return int(text) if text.isdecimal() and len(text) < 6 else None
    return 0


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 and int(text) > 0 else None
