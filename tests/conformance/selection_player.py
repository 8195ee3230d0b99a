"""Plays scripts on ``SelectionService``. Runs in both interpreters: standard library, and pyzmq for engines.

An engine is a PUB socket of this process that sends the KV events of one worker. Scripts write its endpoint ``@name``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DEADLINE_S = 60.0
_TURN_S = 0.002
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def play_selection(llm: Any, script: dict[str, Any], decode: Any) -> list[dict[str, Any]]:
    """The result of every step; ``script["env"]`` is the environment that the service is made in."""
    return asyncio.run(_play(llm, script, decode))


async def _play(llm: Any, script: dict[str, Any], decode: Any) -> list[dict[str, Any]]:
    with _environment(script["env"]):
        service = llm.SelectionService()
    engines = Engines()
    try:
        results = []
        for step in script["steps"]:
            if step["call"] == "publish":
                await engines.publish(service, decode(step))
                results.append({"ok": None})
            else:
                results.append(await _outcome(service, engines.connect(decode(step)), engines))
        return results
    finally:
        await service.shutdown_async()
        engines.close()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


async def _outcome(service: Any, step: dict[str, Any], engines: Engines) -> dict[str, Any]:
    place = "call"
    try:
        result = getattr(service, step["call"])(*step["args"], **step["named"])
        if inspect.isawaitable(result):
            place = "await"
            result = await asyncio.wait_for(result, _DEADLINE_S)
        if step["call"] == "upsert_worker" and result["lifecycle"] == "schedulable":
            await _until(lambda: _has_loads(service, result), "the worker gets no loads")
        return {"ok": engines.hide(_ordered(result))}
    except BaseException as error:
        # Also a panic of the reference, which is no Exception; it ends as a difference.
        if isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
            raise
        described = {"type": type(error).__name__, "message": str(error), "place": place}
        for name in ("kind", "status_code"):
            if hasattr(error, name):
                described[name] = getattr(error, name)
        return {"error": engines.hide(described)}


def _has_loads(service: Any, record: dict[str, Any]) -> bool:
    """The reference takes a moment until a worker appears in the loads."""
    (partition,) = service.loads(model_name=record["model_name"], routing_group=record["routing_group"])
    ranks = 1 if record["data_parallel_size"] is None else record["data_parallel_size"]
    return sum(row["worker_id"] == record["worker_id"] for row in partition["loads"]) == ranks


def _ordered(value: Any) -> Any:
    """A result without what has no order or is random: taints, rows of loads, names that the service gave."""
    if isinstance(value, dict):
        # JSON, which brings the results together, has text keys only.
        result = {name if isinstance(name, str) else repr([name]): _ordered(item) for name, item in value.items()}
        if "taints" in result:
            result["taints"] = sorted(result["taints"])
        return result
    if isinstance(value, (list, tuple)):
        items = [_ordered(item) for item in value]
        if items and all(isinstance(item, dict) and "event" in item for item in items):
            # A dump comes in the order of a hash map, and its event ids count along.
            if [item["event"].pop("event_id") for item in items] != list(range(len(items))):
                raise AssertionError("the event ids of a dump count from 0")
            return sorted(items, key=json.dumps)
        if items and all(isinstance(item, dict) and "potential_decode_blocks" in item for item in items):
            items.sort(key=lambda row: (row["worker_id"], row["dp_rank"]))
        elif items and all(isinstance(item, dict) and "pending_count" in item for item in items):
            items.sort(key=lambda row: (row["model_name"], row["routing_group"]))
        return items
    if isinstance(value, str):
        return _UUID.sub("<uuid>", value)
    return value


class Engines:
    """The engines of one script, by name."""

    def __init__(self) -> None:
        self._sockets: dict[str, Any] = {}
        self._endpoints: dict[str, str] = {}
        self._sent: dict[str, int] = {}

    def connect(self, value: Any) -> Any:
        """``value`` with the endpoints of engines in place of their names; starts those that are new."""
        if isinstance(value, dict):
            return {name: self.connect(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.connect(item) for item in value]
        return self._endpoint(value) if isinstance(value, str) and value.startswith("@") else value

    def hide(self, value: Any) -> Any:
        """The reverse of ``connect``."""
        if isinstance(value, dict):
            return {name: self.hide(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, str):
            for name, endpoint in self._endpoints.items():
                value = value.replace(endpoint, name)
        return value

    async def publish(self, service: Any, step: dict[str, Any]) -> None:
        """Send a batch of events and wait until the service knows of it.

        Raises:
            TimeoutError: It does not.
        """
        socket = self._sockets[step["engine"]]
        sent = self._sent.get(step["engine"], 0)
        if not sent:
            # A PUB socket drops what nobody has subscribed to yet.
            await _until(lambda: socket.poll(0), "nobody subscribes")
        self._sent[step["engine"]] = sent + 1
        socket.send_multipart([b"", struct.pack(">Q", sent), step["batch"]])
        deadline = asyncio.get_running_loop().time() + _DEADLINE_S
        while True:
            scores = await service.overlap_scores(step["request"])
            found = {(row["worker_id"], row["dp_rank"]): row["disk_blocks"] for row in scores["workers"]}
            if found.get(tuple(step["worker"])) == step["blocks"]:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"{found} after {step}")
            await asyncio.sleep(_TURN_S)

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets.values():
            socket.close(linger=0)

    def _endpoint(self, name: str) -> str:
        import zmq

        if name not in self._endpoints:
            socket = zmq.Context.instance().socket(zmq.XPUB)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._sockets[name] = socket
            self._endpoints[name] = f"tcp://127.0.0.1:{port}"
        return self._endpoints[name]


async def _until(condition: Any, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + _DEADLINE_S
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(_TURN_S)
