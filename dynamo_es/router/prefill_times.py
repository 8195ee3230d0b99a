"""How long a worker computes a prompt: what a prefill load model needs to know."""

from __future__ import annotations

from typing import Protocol


class PrefillTimes(Protocol):
    """Predicts durations. Asked in the path of a request: an answer takes well under a millisecond and never blocks."""

    def predict_s(self, tokens: int, prefix: int = 0, batch: int = 1) -> float | None:
        """Seconds for ``batch`` prompts of ``tokens`` new tokens each behind ``prefix`` cached ones.

        None if there is no prediction; never raises.
        """
