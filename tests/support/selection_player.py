"""Plays the scenarios of golden/router/selection.json on a service, and says where it differs."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from dynamo_es.clock import ManualClock
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.errors import SelectionServiceError
from dynamo_es.router.selection_service import SelectionService

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/router/selection.json").read_text())
# Selected worker of a scenario with ties: which one is chance.
_CHANCE = ("worker_id", "dp_rank", "endpoint", "overlap", "effective_prefill_tokens")
_SYNC = {"ready", "list_workers", "loads", "add_output_block", "shutdown"}


class Engine:
    """An engine's publisher. It knows when somebody listens."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.sent = 0

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    async def subscribed(self) -> None:
        """Wait for one more listener."""
        async with asyncio.timeout(60):
            while not (await self._socket.recv()).startswith(b"\x01"):
                pass

    async def publish(self, batch: Any) -> None:
        frames = [b"kv", self.sent.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]
        self.sent += 1
        await self._socket.send_multipart(frames)


class Player:
    """One scenario on one service."""

    def __init__(self, scenario: dict[str, Any], folder: Path) -> None:
        self.scenario = scenario
        self.clock = ManualClock()
        self.engines: dict[str, Engine] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.listening: set[tuple[int, int]] = set()
        self.context = zmq.asyncio.Context()
        env = dict(scenario["env"])
        for name, text in scenario["files"].items():
            (folder / name).write_text(text)
            env = {key: value.replace(f"{{file:{name}}}", str(folder / name)) for key, value in env.items()}
        options = dict(scenario.get("service") or {})
        if "selection_cache" in options:
            options["selection_cache"] = SelectionCacheConfig(**options["selection_cache"])
        self.service = SelectionService(env=env, clock=self.clock, rng=random.Random(1), **options)

    async def play(self) -> list[str]:
        """What differs, one line each."""
        differences = []
        try:
            for number, step in enumerate(self.scenario["steps"]):
                result = await self.step(step)
                if number in self.scenario["unstable_steps"]:
                    continue
                expected = step.get("result")
                if expected is not None and not self.equal(result, expected):
                    differences.append(f"step {number} {step['op']}: {result}\n    expected {expected}")
                await self.follow(step)
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            await self.service.shutdown_async()
            self.context.destroy(linger=0)
        return differences

    async def step(self, step: dict[str, Any]) -> Any:
        operation = step["op"]
        if operation == "sleep":
            self.clock.advance(step["secs"])
        elif operation == "publish":
            await self.engines[step["pub"]].publish(step["batch"])
        elif operation == "start":
            call = getattr(self.service, step["call"])(step["args"])
            self.tasks[step["task"]] = asyncio.ensure_future(call)
            await self.settle()
            self.clock.advance(0.01)
        elif operation == "poll":
            await self.settle()
            task = self.tasks[step["task"]]
            return await self.outcome(lambda: task) if task.done() else {"pending": True}
        else:
            return await self.outcome(lambda: self.call(operation, self.with_urls(step["args"])))
        return None

    def call(self, operation: str, args: dict[str, Any]) -> Any:
        method = getattr(self.service, operation)
        if operation in ("prefill_complete", "free_reservation"):
            return method(args["selection_id"])
        if operation == "delete_worker":
            return method(args["worker_id"])
        if operation == "add_output_block":
            return method(args["selection_id"], decay_fraction=args["decay_fraction"])
        return method(**args) if operation in _SYNC else method(args)

    async def outcome(self, call: Any) -> dict[str, Any]:
        try:
            result = call()
            if asyncio.isfuture(result) or asyncio.iscoroutine(result):
                result = await result
            return {"ok": None if result == () else self.with_names(result)}
        except SelectionServiceError as error:
            return {
                "error": {
                    "type": "SelectionServiceError",
                    "message": str(error),
                    "kind": error.kind,
                    "status_code": error.status_code,
                }
            }
        except ValueError as error:
            return {"error": {"type": "ValueError", "message": str(error)}}

    def with_urls(self, args: dict[str, Any]) -> dict[str, Any]:
        """Arguments with engines' addresses for their names, and ranks as integers."""
        args = dict(args)
        if isinstance(args.get("kv_events_endpoint"), str):
            args["kv_events_endpoint"] = self.url(args["kv_events_endpoint"])
        if args.get("kv_events_endpoints"):
            args["kv_events_endpoints"] = {
                int(rank): self.url(name) for rank, name in args["kv_events_endpoints"].items()
            }
        return args

    def url(self, name: str) -> str:
        if not name.startswith("@"):
            return name
        if name not in self.engines:
            self.engines[name] = Engine(self.context)
        return self.engines[name].url

    def with_names(self, value: Any) -> Any:
        if isinstance(value, dict):
            # As it was recorded: JSON has text for the keys of endpoints by rank.
            return {str(key): self.with_names(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.with_names(item) for item in value]
        if isinstance(value, str):
            return next((name for name, engine in self.engines.items() if engine.url == value), value)
        return value

    async def follow(self, step: dict[str, Any]) -> None:
        """Wait until what the step caused in the background has happened."""
        relays = self.service._fleet.relays
        by_url = {engine.url: engine for engine in self.engines.values()}
        for key, relay in relays.items():
            engine = by_url.get(relay._endpoint)
            if engine is not None and (key, relay) not in self.listening:
                self.listening.add((key, relay))
                await engine.subscribed()
        if step["op"] == "publish":
            engine = self.engines[step["pub"]]
            relay = next(relay for relay in relays.values() if relay._endpoint == engine.url)
            async with asyncio.timeout(60):
                while relay.counters.messages < engine.sent:
                    await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """Let every task that can go on do so."""
        for _ in range(10):
            await asyncio.sleep(0)

    def equal(self, result: Any, expected: Any) -> bool:
        return self.comparable(result) == self.comparable(expected)

    def comparable(self, value: Any) -> Any:
        if isinstance(value, dict):
            value = dict(value)
            if self.scenario["has_ties"] and "endpoint" in value and "lifecycle" not in value:
                for name in _CHANCE:
                    value.pop(name, None)
            if "selection_id" in value and len(value["selection_id"]) == 36:
                value["selection_id"] = "<uuid>"
            return {key: self.comparable(item) for key, item in value.items()}
        if isinstance(value, list):
            items = [self.comparable(item) for item in value]
            if items and isinstance(items[0], dict) and "potential_prefill_tokens" in items[0]:
                items.sort(key=lambda row: (row["worker_id"], row["dp_rank"]))
            return items
        return value
