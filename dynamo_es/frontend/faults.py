"""Descriptions of unexpected errors for logs: type and place, never the message, which may hold parts of a prompt."""

from __future__ import annotations

import traceback

_FRAMES = 6


def describe(error: BaseException) -> str:
    """For example ``KeyError at pipeline.py:120 in push < exchange.py:88 in _pump``."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
    cause = error.__cause__
    text = f"{type(error).__name__} at {' < '.join(places)}" if places else type(error).__name__
    return text if cause is None else f"{text}, caused by {type(cause).__name__}"
