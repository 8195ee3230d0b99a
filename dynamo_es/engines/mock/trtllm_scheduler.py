"""TensorRT-LLM's scheduler, by its policy GUARANTEED_NO_EVICT (spec/services h.6). Pure."""

from __future__ import annotations

from dynamo_es.engines.scheduling.request import EngineRequest
from dynamo_es.engines.scheduling.scheduler import Scheduler


class TrtllmScheduler(Scheduler):
    """A request has room for its whole output before it begins, so that nobody has to give way."""

    def _fits(self, request: EngineRequest, matched: int) -> bool:
        promised = sum(self._most_blocks(running) - len(running.table) for running in self.running)
        return self.blocks.fits(request.sequence_hashes, matched, self._most_blocks(request), promised)

    def _most_blocks(self, request: EngineRequest) -> int:
        """Blocks that a request has at its end: the last token is sampled and never computed."""
        return max(1, -(-(request.prompt_length + request.max_tokens - 1) // self._block_size))
