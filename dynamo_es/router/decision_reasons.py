"""Why a routing decision went as it did, in a fixed set of words that metrics and ``dynamo-es diagnose`` use. Pure.

In KV mode one of ``KV_REASONS``; in another mode the mode's own name.
"""

from __future__ import annotations

from collections.abc import Sequence

OVERLAP = "overlap"
EQUAL_OVERLAP = "equal-overlap"
LOAD_OVER_OVERLAP = "load-over-overlap"
NO_OVERLAP = "no-overlap"
NO_EVENTS = "no-events"
PROMPT_UNDER_ONE_BLOCK = "prompt-under-one-block"
KV_REASONS = (OVERLAP, EQUAL_OVERLAP, LOAD_OVER_OVERLAP, NO_OVERLAP, NO_EVENTS, PROMPT_UNDER_ONE_BLOCK)


def decision_reason(
    mode: str,
    isl_tokens: int,
    block_size: int,
    chosen: float,
    overlaps: Sequence[float],
    best: float,
    *,
    informed: bool,
) -> str:
    """The word for one decision.

    Args:
        mode: Of the router.
        isl_tokens: Length of the prompt.
        block_size: Tokens a block.
        chosen: Cached blocks of the prompt at the choice; only whether there are any counts, so not rounded to none.
        overlaps: The same at every candidate.
        best: The most of these; 0 if there are none.
        informed: Whether the cache of any worker is known at all.
    """
    if mode != "kv":
        return mode
    if isl_tokens < block_size:
        return PROMPT_UNDER_ONE_BLOCK
    if chosen:
        # What all have alike decides nothing; a single worker is chosen whatever it has.
        alike = len(overlaps) > 1 and overlaps.count(overlaps[0]) == len(overlaps)
        return EQUAL_OVERLAP if alike else OVERLAP
    if best:
        return LOAD_OVER_OVERLAP
    return NO_OVERLAP if informed else NO_EVENTS
