"""A diagnosis as lines for people. Pure.

Names and reasons are words of other processes: they are shown without what would steer a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_es.diagnosis.causes import Cause, Diagnosis
from dynamo_es.runtime.letters import printable

MAX_LINE = 4_000
"""Characters of a line; of what is longer, its beginning."""


def text_of(diagnosis: Diagnosis) -> Iterator[str]:
    """One line a cause, below the model that it is about; printable, at most about ``MAX_LINE`` characters each."""
    for line in _lines(diagnosis):
        yield printable(line, MAX_LINE)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    for cause in diagnosis.causes:
        yield _line(cause)
    for model in diagnosis.models:
        verdict = "routed by cache" if model.by_cache else "NOT routed by cache" if model.causes else "not by cache"
        yield f"model {model.model}: {verdict}: {model.summary}"
        for cause in model.causes:
            yield f"  {_line(cause)}"


def _line(cause: Cause) -> str:
    return f"{cause.code}: {cause.what}. To do: {cause.do}"
