"""A frontend without HTTP (``--interactive``): router and views in this process, and a person at the terminal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from dynamo_es.clock import Clock
from dynamo_es.frontend.main import FrontendSettings, process_metrics, recover, unless_stopped
from dynamo_es.frontend.routing_plan import plan_routing
from dynamo_es.frontend.terminal_chat import TerminalChat, Write, ready_model
from dynamo_es.frontend.tokenizer_backends import check_backend
from dynamo_es.log.base import EventLog
from dynamo_es.router.build import check_mode
from dynamo_es.router.modes import mode_named
from dynamo_es.runtime.core import RuntimeCore


async def run_interactive(
    settings: FrontendSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    lines: AsyncIterator[str],
    write: Write,
    model: str | None = None,
    log: EventLog | None = None,
) -> None:
    """Chat until ``lines`` end or ``stop`` is set, then give everything back.

    Args:
        model: Name of the model; None: the first that is ready.
        lines: What the person says.
        write: Shows text.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    check_mode(mode_named(settings.frontend.router_mode))
    check_backend(settings.frontend)
    plan = plan_routing(settings.frontend, settings.router, settings.aic)
    core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    metrics = process_metrics(core, settings.frontend.metrics_prefix)
    executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def chat() -> None:
        app = await recover(settings, plan, core, metrics, executor)
        name = await ready_model(app.service.directory, model, write)
        await TerminalChat(app, settings.paths.chat, name, write).run(lines)

    try:
        await unless_stopped(stop, chat())
    finally:
        await core.close()
        executor.shutdown(wait=False, cancel_futures=True)
