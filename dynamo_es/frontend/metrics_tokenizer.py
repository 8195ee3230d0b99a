"""Metrics of the tokenizers' caches, under Dynamo's names (spec/frontend.md 5.1)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_es.frontend.tokenizer_cache import CacheTally


class TokenizerCacheCollector(Collector):
    """Gives the counts of all models that were loaded; those of one that left stay, as counters do.

    ``<prefix>_tokenizer_cache_hits_total`` and ``_misses_total`` count prompts, by whether their beginning was found;
    ``_cached_tokens_total`` and ``_uncached_tokens_total`` count tokens, by model.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}_tokenizer_cache"
        self._tallies: dict[str, CacheTally] = {}

    def tally_of(self, model: str) -> CacheTally:
        """The counts of a model, made when they are first asked for."""
        return self._tallies.setdefault(model, CacheTally())

    def collect(self) -> Iterator[Metric]:
        tallies = dict(self._tallies)
        found, missed = sum(one.hits for one in tallies.values()), sum(one.misses for one in tallies.values())
        yield CounterMetricFamily(f"{self._prefix}_hits", "Prompts whose beginning was found", found)
        yield CounterMetricFamily(f"{self._prefix}_misses", "Prompts whose beginning was not found", missed)
        cached = CounterMetricFamily(f"{self._prefix}_cached_tokens", "Tokens from the cache", labels=["model"])
        made = CounterMetricFamily(f"{self._prefix}_uncached_tokens", "Tokens made anew", labels=["model"])
        for model, tally in tallies.items():
            cached.add_metric([model], tally.cached_tokens)
            made.add_metric([model], tally.uncached_tokens)
        yield cached
        yield made
