"""Runs passes on a model: each part of a prompt by itself, sequences that want their next token as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynamo_es.engines.transformers_engine.model_adapters import ModelAdapters
from dynamo_es.engines.transformers_engine.paged_cache import KvPool, PagedCache
from dynamo_es.engines.transformers_engine.sampler import Choice
from dynamo_es.engines.transformers_engine.work import SequenceWork


class TorchRunner:
    """A ``ModelRunner``."""

    def __init__(self, model: Any, pool: KvPool, adapters: ModelAdapters) -> None:
        self._model = model
        self._pool = pool
        self._device = model.device
        self._adapters = adapters

    def run(self, works: Sequence[SequenceWork]) -> list[Choice | None]:
        """As ``ModelRunner``. Raises RuntimeError of torch, such as for memory that is not there."""
        choices: list[Choice | None] = [None] * len(works)
        with torch.inference_mode():
            for places in _groups(works):
                group = [works[place] for place in places]
                self._adapters.activate(group[0].adapter)
                logits = self._forward(group)
                if group[0].sampler is not None:
                    for place, choice in zip(places, _choose(group, logits), strict=True):
                        choices[place] = choice
        return choices

    def load_adapter(self, name: str, folder: str) -> None:
        """As ``ModelRunner``."""
        self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """As ``ModelRunner``."""
        self._adapters.unload(name)

    def _forward(self, group: Sequence[SequenceWork]) -> torch.Tensor:
        """Logits behind each part's last token [sequences, vocabulary]; all parts are equally long."""
        device, size = self._device, self._pool.block_size
        count = len(group[0].tokens)
        starts = torch.tensor([work.start for work in group], device=device)
        positions = starts[:, None] + torch.arange(count, device=device)
        length = max(work.start for work in group) + count
        width = -(-length // size)
        tables = torch.tensor(
            [[*work.blocks[:width], *[0] * (width - len(work.blocks))] for work in group], device=device
        )
        slots = (tables.gather(1, positions // size) * size + positions % size).flatten()
        seen = torch.arange(length, device=device) <= positions[:, :, None]
        mask = torch.zeros(seen.shape, dtype=self._model.dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(self._model.dtype).min)
        output = self._model(
            input_ids=torch.tensor([list(work.tokens) for work in group], device=device),
            attention_mask=mask[:, None],
            position_ids=positions,
            past_key_values=PagedCache(self._pool, tables, slots, length),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _groups(works: Sequence[SequenceWork]) -> Iterator[list[int]]:
    """Places of the parts that are computed together: single tokens that want the next one, an adapter's each."""
    steps: dict[str | None, list[int]] = {}
    for place, work in enumerate(works):
        if len(work.tokens) == 1 and work.sampler is not None:
            steps.setdefault(work.adapter, []).append(place)
    yield from steps.values()
    taken = {place for places in steps.values() for place in places}
    for place in range(len(works)):
        if place not in taken:
            yield [place]


def _choose(group: Sequence[SequenceWork], logits: torch.Tensor) -> Iterator[Choice]:
    """The next token of each; logits leave the device only if somebody wants more than the largest one."""
    samplers = [work.sampler for work in group]
    best = logits.argmax(dim=-1).tolist()
    rows: Any = None
    for place, sampler in enumerate(samplers):
        assert sampler is not None
        if sampler.is_plain:
            sampler.note(best[place])
            yield Choice(best[place])
            continue
        if rows is None:
            rows = logits.float().cpu().numpy()
        yield sampler.choose(rows[place])
