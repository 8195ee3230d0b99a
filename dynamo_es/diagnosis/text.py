"""A diagnosis as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_es.diagnosis.causes import Cause, Diagnosis


def text_of(diagnosis: Diagnosis) -> Iterator[str]:
    """One line a cause, below the model that it is about."""
    for cause in diagnosis.causes:
        yield _line(cause)
    for model in diagnosis.models:
        verdict = "routed by cache" if model.by_cache else "NOT routed by cache" if model.causes else "not by cache"
        yield f"model {model.model}: {verdict}: {model.summary}"
        for cause in model.causes:
            yield f"  {_line(cause)}"


def _line(cause: Cause) -> str:
    return f"{cause.code}: {cause.what}. To do: {cause.do}"
