"""Headers that say where a request should go; they go before what its ``nvext`` says (spec/frontend.md 3.2). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_es.frontend.requests import AgentHints, NvExt

_WORKER = (b"x-dynamo-worker-instance-id", b"x-worker-instance-id")
_PREFILL_WORKER = (b"x-dynamo-prefill-instance-id", b"x-prefill-instance-id")
_RANK = (b"x-dynamo-dp-rank", b"x-dp-rank", b"x-data-parallel-rank")
_PREFILL_RANK = (b"x-dynamo-prefill-dp-rank", b"x-prefill-dp-rank")
_PRIORITY = b"x-dynamo-request-priority"
_STRICT_PRIORITY = b"x-dynamo-request-strict-priority"
_TENANT = b"x-tenant-id"
ROUTING_HEADERS = frozenset((*_WORKER, *_PREFILL_WORKER, *_RANK, *_PREFILL_RANK, _PRIORITY, _STRICT_PRIORITY, _TENANT))
_U64 = 2**64 - 1
_NO_RANK = 2**32 - 1
_I32 = (-(2**31), 2**31 - 1)
_MAX_DIGITS = 20


def with_headers(extension: NvExt | None, headers: Mapping[bytes, bytes]) -> NvExt | None:
    """The extension object with what ``ROUTING_HEADERS`` say instead; values that cannot be read say nothing."""
    changes: dict[str, Any] = {}
    worker = _first(headers, _WORKER, _U64)
    if worker is not None:
        changes |= {"backend_instance_id": worker, "decode_worker_id": worker}
    for name, sources, limit in (
        ("prefill_worker_id", _PREFILL_WORKER, _U64),
        ("dp_rank", _RANK, _NO_RANK - 1),
        ("prefill_dp_rank", _PREFILL_RANK, _NO_RANK - 1),
    ):
        value = _first(headers, sources, limit)
        if value is not None:
            changes[name] = value
    tenant = headers.get(_TENANT, b"").decode("latin-1").strip()
    if tenant:
        changes["cache_salt"] = tenant
    known = extension if extension is not None else NvExt()
    hints = _hints(known.agent_hints, headers)
    if hints is not None:
        changes["agent_hints"] = hints
    return msgspec.structs.replace(known, **changes) if changes else extension


def _hints(hints: AgentHints | None, headers: Mapping[bytes, bytes]) -> AgentHints | None:
    """Hints with other priorities; None: the headers say none."""
    changes = {
        name: value
        for name, header, low, high in (
            ("priority", _PRIORITY, *_I32),
            ("strict_priority", _STRICT_PRIORITY, 0, _NO_RANK),
        )
        if (value := _integer(headers.get(header), low, high)) is not None
    }
    return msgspec.structs.replace(hints if hints is not None else AgentHints(), **changes) if changes else None


def _first(headers: Mapping[bytes, bytes], names: tuple[bytes, ...], limit: int) -> int | None:
    found = next((headers[name] for name in names if name in headers), None)
    return _integer(found, 0, limit)


def _integer(text: bytes | None, low: int, high: int) -> int | None:
    digits = (text or b"").strip()
    if len(digits) > _MAX_DIGITS or not digits.removeprefix(b"-").isdigit():
        return None
    value = int(digits)
    return value if low <= value <= high else None
