"""A running OpenAI-compatible server as a worker of the fleet, without any change to it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.engines.attach.dialects import Reader
from dynamo_es.engines.attach.find_out import DEFAULT_BLOCK_SIZE, Encode, Found, find_out
from dynamo_es.engines.attach.model_files import model_directory
from dynamo_es.engines.attach.text_in import TextReader, text_body, text_choices, text_path
from dynamo_es.engines.attach.upstream import Upstream
from dynamo_es.engines.attach.watch import UpstreamWatch
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.errors import (
    CannotConnect,
    ConfigError,
    ConnectionTimeout,
    Disconnected,
    InvalidArgument,
    StreamIncomplete,
)
from dynamo_es.frontend.capabilities import UNSUPPORTED_FIELDS
from dynamo_es.frontend.parsers.model import REASONING_PARSER, TOOL_CALL_PARSER
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.log.base import EventLog
from dynamo_es.models.fetch import Hub
from dynamo_es.models.taint_route import TAINTS_ROUTE, taints_route
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.errors import Overloaded
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)
DEFAULT_ENDPOINT = "dynamo.backend.generate"
# How often an upstream that is not there yet is told about: engines take minutes to start.
_TELL_EVERY_S = 30.0
_SUSPICIOUS = (CannotConnect, Disconnected, ConnectionTimeout, StreamIncomplete, Overloaded)


@dataclass(frozen=True, slots=True)
class AttachSettings:
    """Everything that such a worker process is configured by."""

    process: RuntimeSettings
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    attach: AttachConfig = field(default_factory=AttachConfig)


@dataclass(frozen=True, slots=True)
class Material:
    """What is known of the model here; without ``encode`` its files were not named."""

    facts: ModelFacts
    encode: Encode | None = None


def check_settings(settings: AttachSettings) -> None:
    """Raises ``ConfigError``: options that do not go together."""
    attach = settings.attach
    if not attach.upstream:
        raise ConfigError("--upstream is missing: give the server's URL, such as http://127.0.0.1:8000")
    if attach.kv_events_replay and len(attach.kv_events_replay) != len(attach.kv_events):
        raise ConfigError("--kv-events-replay must be given as often as --kv-events, in the same order")


def load_material(
    worker: WorkerConfig, attach: AttachConfig, env: Mapping[str, str], fetch: Callable[[str], Path]
) -> Material:
    """Read the model's files, if they are named. Blocks. ``env``, ``fetch``: as of ``model_directory``.

    Raises ``ConfigError``.
    """
    wants_tokens = attach.input == "tokens" or worker.model_path != BUILTIN_MODEL
    if attach.input == "text" or not wants_tokens:
        return Material(ModelFacts("", "", 0))
    source = worker.model_path
    if source != BUILTIN_MODEL:
        source = str(model_directory(source, fetch, env))
    facts = read_model_facts(source)
    tokenizer, _ = load_tokenizer(source)
    return Material(facts, lambda text: tokenizer.encode(text, False))


class AttachedWorker:
    """One upstream behind one endpoint. ``run`` once."""

    def __init__(self, settings: AttachSettings, material: Material, core: RuntimeCore, upstream: Upstream) -> None:
        self._settings = settings
        self._attach = settings.attach
        self._material = material
        self._core = core
        self._upstream = upstream
        self.endpoint = Endpoint(core, settings.worker.endpoint or DEFAULT_ENDPOINT)
        self._found: Found
        self._name = ""
        self._ranks = max(len(self._attach.kv_events), 1)
        self._watch: UpstreamWatch | None = None

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Wait for the upstream, register, and serve until the core shuts down; open streams run to their end.

        Raises:
            DynamoException: It cannot start; nothing stays registered.
        """
        found = self._found = await self._wait_for_upstream()
        self._name = self._settings.worker.model_name or found.model
        core = self._core
        await core.start()
        publishers = self._publish_kv_events()
        metrics = WorkerMetricsPublisher()
        await metrics.create_endpoint(self.endpoint)
        where = self.endpoint.parts
        await core.registration.register(key_model(*where, core.instance_id), self._card())
        self._watch = UpstreamWatch(self._upstream, self._attach, found, self.endpoint, publishers, metrics)
        logger.info(
            "attached to %s: model %s gets %s", self._upstream.url, found.model,
            "text" if found.dialect is None else f"token ids as {found.dialect.name} takes them",
        )  # fmt: skip
        watching = asyncio.create_task(self._watch.run(), name="upstream-watch")
        serving = asyncio.create_task(self.endpoint.serve_endpoint(self.handle), name="attached-worker")
        try:
            on_ready(core.instance_id)
            done, _ = await asyncio.wait([watching, serving], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            watching.cancel()
            if not serving.done():
                core.shutdown_event.set()
            await asyncio.gather(watching, serving, return_exceptions=True)

    async def _wait_for_upstream(self) -> Found:
        told_at = float("-inf")
        while True:
            try:
                return await find_out(self._upstream, self._attach, self._material.encode)
            except (CannotConnect, Disconnected, ConnectionTimeout) as error:
                now = self._core.clock.monotonic()
                if now - told_at >= _TELL_EVERY_S:
                    logger.warning("waiting for the upstream: %s", error)
                    told_at = now
                await asyncio.sleep(self._attach.health_interval_s)

    def _publish_kv_events(self) -> list[KvEventPublisher]:
        attach, block_size = self._attach, self._block_size()
        if not attach.kv_events:
            return []
        if block_size is None:
            raise ConfigError("--kv-events needs --kv-block-size: the upstream's metrics do not say it")
        if self._found.dialect is None:
            logger.warning("this worker gets text, so requests are not routed by its KV events; see --upstream-input")
        replays = attach.kv_events_replay or (None,) * len(attach.kv_events)
        return [
            KvEventPublisher(
                self.endpoint,
                kv_block_size=block_size,
                dp_rank=rank,
                zmq_endpoint=address,
                zmq_topic=attach.kv_events_topic,
                zmq_replay_endpoint=replay,
            )
            for rank, (address, replay) in enumerate(zip(attach.kv_events, replays, strict=True))
        ]

    def _block_size(self) -> int | None:
        told, found = self._attach.kv_block_size, self._found.block_size
        if told is not None and found is not None and told != found:
            raise ConfigError(f"--kv-block-size {told}: the upstream's blocks have {found} tokens, by its metrics")
        return told or found

    def _card(self) -> ModelCard:
        found, facts = self._found, self._material.facts
        lengths = [length for length in (found.context_length, facts.context_length) if length]
        runtime_config: dict[str, Any] = {
            "data_parallel_start_rank": 0,
            "data_parallel_size": self._ranks,
            "context_length": min(lengths, default=0),
        }
        if found.total_blocks is not None:
            runtime_config["total_kv_blocks"] = found.total_blocks
        if found.dialect is not None:
            runtime_config |= {
                TOOL_CALL_PARSER: self._settings.worker.tool_call_parser,
                REASONING_PARSER: self._settings.worker.reasoning_parser,
                UNSUPPORTED_FIELDS: dict(found.dialect.unsupported),
            }
        card = make_card(
            facts if found.dialect is not None else ModelFacts("", found.model, found.context_length),
            self.endpoint.parts,
            self._core.instance_id,
            name=self._name,
            block_size=self._block_size() or DEFAULT_BLOCK_SIZE,
            runtime_config=runtime_config,
        )
        return card if found.dialect is not None else msgspec.structs.replace(card, model_input="Text")

    async def handle(self, request: Any, context: Context) -> AsyncGenerator[Batch, None]:
        """Answer one request. Raises what ``Upstream.stream`` and its readers do."""
        assert self._watch is not None
        if not isinstance(request, dict):
            raise InvalidArgument("the request must be a map")
        if not self._watch.vitals.up:
            raise CannotConnect(f"the upstream is not well: {self._watch.vitals.reason}")
        path, body, reader = self._translated(request)
        headers = self._headers(request, context)
        try:
            async with aclosing(self._upstream.stream(path, body, context, headers)) as arrivals:
                async for events in arrivals:
                    frames = [frame for event in events for frame in reader.read(event)]
                    if frames:
                        yield Batch(frames)
        except StreamIncomplete:
            # Not every server sends an end mark behind a last event.
            if not reader.finished:
                self._watch.suspect()
                raise
        except _SUSPICIOUS:
            self._watch.suspect()
            raise

    def _translated(self, request: Mapping[str, Any]) -> tuple[str, dict[str, Any], Reader]:
        dialect, model = self._found.dialect, self._found.model
        if dialect is None:
            reader: Reader = TextReader(self._name, text_choices(request))
            return text_path(request), text_body(request, model), reader
        token_ids = request.get("token_ids")
        if not isinstance(token_ids, list) or not token_ids or not isinstance(token_ids[0], int):
            raise InvalidArgument("the request must have `token_ids`, one list")
        return dialect.path, dialect.body(request, model, self._max_tokens(request)), dialect.reader(request)

    def _max_tokens(self, request: Mapping[str, Any]) -> int | None:
        """What is asked for; else what fits: servers have small defaults of their own."""
        wanted = (request.get("stop_conditions") or {}).get("max_tokens")
        if wanted is not None:
            return int(wanted)
        length = self._found.context_length or self._material.facts.context_length
        return max(length - len(request["token_ids"]), 1) if length else None

    def _headers(self, request: Mapping[str, Any], context: Context) -> dict[str, str]:
        identity = context.id()
        headers = {"X-Request-Id": identity} if identity.isascii() and identity.isprintable() else {}
        rank = (request.get("routing") or {}).get("dp_rank")
        if isinstance(rank, int) and self._ranks > 1:
            headers["X-data-parallel-rank"] = str(rank)
        return headers


async def run_attached_worker(
    settings: AttachSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[int], None] = lambda worker_id: None,
) -> None:
    """Serve until ``stop`` is set, then drain. An upstream that is not there yet is waited for.

    Raises:
        DynamoException: It cannot start, or broke down.
    """
    check_settings(settings)
    material = await asyncio.to_thread(
        load_material, settings.worker, settings.attach, os.environ, partial(Hub().download, ignore_weights=True)
    )
    upstream = await asyncio.to_thread(Upstream, settings.attach)
    core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    worker = AttachedWorker(settings, material, core, upstream)
    core.engine_routes[TAINTS_ROUTE] = taints_route([worker.endpoint])
    async with upstream:
        await run_until_stopped(stop, [core], [worker.run(on_ready)])
