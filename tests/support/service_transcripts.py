"""Plays recorded conversations with Dynamo's standalone services on an ASGI application, and says where it differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parents[1] / "data/golden/services"
REST = json.loads((FOLDER / "http_services_rest.json").read_text())["steps"]
Masked = Callable[[str, Any], Any]
"""Step and body to what of the body is compared."""


def steps(name: str) -> list[dict[str, Any]]:
    """The steps, each with its response: the transcript's, or the one recorded for what that leaves out."""
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["steps"]
    for step in found:
        if step["response"] == "<withheld>":
            step["response"] = REST[name].get(step["case"])
    return found


def unordered(value: Any) -> Any:
    """A value with its lists of objects and texts in one order; lists of numbers stay as they are."""
    if isinstance(value, dict):
        return {name: unordered(item) for name, item in value.items()}
    if isinstance(value, list):
        items = [unordered(item) for item in value]
        is_data = all(isinstance(item, int | float) for item in items)
        return items if is_data else sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    return value


async def play(
    app: Any,
    name: str,
    elsewhere: Mapping[str, str],
    masked: Masked,
    before: Mapping[str, Callable[[], None]] | None = None,
) -> list[str]:
    """Send every request in order; what differs, a line each.

    Args:
        app: The service.
        name: Of the transcript.
        elsewhere: Steps whose response is not compared, each with the reason.
        masked: Gives what is compared.
        before: What happens before a step.
    """
    differences = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        for step in steps(name):
            case, expected = step["case"], step["response"]
            (before or {}).get(case, lambda: None)()
            found = await _send(client, step["request"])
            if case in elsewhere or expected is None:
                continue
            for part in ("status", "content_type"):
                if found[part] != expected[part]:
                    differences.append(f"{case}: {part} {found[part]!r}, recorded {expected[part]!r}")
            got, wanted = (unordered(masked(case, answer["body"])) for answer in (found, expected))
            if got != wanted:
                differences.append(f"{case}: {json.dumps(got)[:600]}\n  recorded {json.dumps(wanted)[:600]}")
    return differences


async def _send(client: httpx.AsyncClient, request: Mapping[str, Any]) -> dict[str, Any]:
    content: bytes | None = None
    headers = {"content-type": "application/json"}
    if "json" in request:
        content = json.dumps(request["json"]).encode()
    elif "raw" in request:
        raw = request["raw"]
        content = raw.encode()
        if raw == "{}":  # recorded without a content type
            headers = {}
        elif raw.startswith("<"):
            content = json.dumps({"model_name": "m", "sequence_hashes": list(range(400_000))}).encode()
    else:
        headers = {}
    response = await client.request(request["method"], request["path"], content=content, headers=headers)
    kind = response.headers.get("content-type")
    body: Any = response.json() if kind == "application/json" else response.text
    return {"status": response.status_code, "content_type": kind, "body": body}
