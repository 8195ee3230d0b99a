"""Folding one record: decode it, apply it, and say why it was refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeVar

from dynamo_es.log.base import Record
from schemas.codec import SchemaError, TopicCodec
from streams.fold import Fold, RecordRejected

logger = logging.getLogger(__name__)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a record was not folded. ``reason`` is that of a dead letter."""

    reason: str
    detail: str


def apply_record(fold: Fold[S], state: S, codec: TopicCodec, record: Record) -> Refusal | None:
    """Fold ``record`` into ``state``; why not, if it was refused.

    Part of a supervisor: whatever a record does to the fold, the next one is folded.
    """
    try:
        value = None if record.value is None else codec.decode(record.value, record.headers)
        fold.apply(state, record, value)
    except SchemaError as error:
        return Refusal(error.reason, error.detail)
    except RecordRejected as error:
        return Refusal("rejected", str(error))
    except Exception as error:
        logger.exception("%s: failed at %s[%d]@%d", fold.name, record.topic, record.partition, record.offset)
        return Refusal("rejected", f"{type(error).__name__}: {error}")
    return None
