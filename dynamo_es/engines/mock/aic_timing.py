"""Pass times from AIC's performance model instead of Dynamo's polynomials (spec: services i)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dynamo_es.engines.mock.timing import new_tokens
from dynamo_es.router.aic_model import AicEngine

logger = logging.getLogger(__name__)


class AicTiming:
    """A ``TimingModel``. It asks for passes whose requests are all of the mean length, as the model has them.

    A pass that the model has no answer for takes as long as the one before it; ``failures`` counts them, and the first
    is logged. A deployment without any answer is found out before, by ``load_aic_engine``.
    """

    def __init__(self, engine: AicEngine) -> None:
        self._engine = engine
        self._last_ms = {"prefill": 0.0, "decode": 0.0}
        self.failures = 0

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        count = len(chunks)
        tokens = new_tokens(prefixes, chunks)
        if not tokens:
            return 0.0
        prefix = sum(prefixes) // count
        return self._ask(
            "prefill", lambda: self._engine.predict_prefill_latency(count, prefix + tokens // count, prefix)
        )

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        if not context_tokens:
            return 0.0
        # Two tokens: from the one to the other is one pass.
        return self._ask(
            "decode", lambda: self._engine.predict_decode_latency(requests, max(1, context_tokens // requests), 2)
        )

    def _ask(self, part: str, predict: Callable[[], float]) -> float:
        try:
            self._last_ms[part] = predict()
        except (ValueError, RuntimeError) as error:
            self.failures += 1
            if self.failures == 1:
                logger.warning("AIC predicts no time for a %s pass: %s (told once)", part, error)
        return self._last_ms[part]
