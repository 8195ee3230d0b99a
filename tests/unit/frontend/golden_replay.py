"""Replays recorded exchanges with Dynamo's frontend, without what differs each time: ids, times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
MODEL_DIR = DATA / "models" / "smollm2-135m-instruct"
MASKS = (
    (re.compile(r"(chatcmpl|cmpl|call)-[0-9a-f-]{36}"), r"\1-ID"),
    (re.compile(r"(resp|msg|fc|toolu)_[0-9a-f]{32}"), r"\1_ID"),
    (re.compile(r'"(created|created_at|completed_at)":\d+'), r'"\1":0'),
    (re.compile(r'(event: request_id\n: )"[0-9a-f-]{36}"'), r'\1"ID"'),
    (re.compile(r'"((?:prefill|decode)_worker_id|request_received_ms)":\d+'), r'"\1":0'),
    (re.compile(r'"((?:prefill_wait_time|prefill_time|ttft|total_time)_ms)":[\d.e-]+'), r'"\1":0'),
    (re.compile(r'"created_at":"[0-9TZ:-]+"'), '"created_at":"T"'),
)


def recorded(groups: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names (group/name) and exchanges of these groups."""
    for group in groups:
        for item in json.loads((DATA / "golden" / "frontend" / f"{group}.json").read_text()):
            yield f"{group}/{item['name']}", item


def request_bytes(body: Any) -> bytes:
    if isinstance(body, dict) and "__note__" in body:
        return b" " * int(body["__note__"].removesuffix(" bytes"))
    if isinstance(body, dict) and "__bytes_latin1__" in body:
        return body["__bytes_latin1__"].encode("latin-1")
    if isinstance(body, dict | list):
        return json.dumps(body).encode()
    return (body or "").encode()


def masked(text: str) -> str:
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def flat(text: str) -> str:
    """An error without the members that it has here only."""
    body = json.loads(text)
    body.pop("error", None)
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def holds(ours: Any, theirs: Any) -> bool:
    """Whether all that was recorded is there, in lists in any order."""
    if isinstance(theirs, dict):
        return all(name in ours and holds(ours[name], value) for name, value in theirs.items())
    if isinstance(theirs, list):
        return all(any(holds(one, value) for one in ours) for value in theirs)
    return bool(ours == theirs)
