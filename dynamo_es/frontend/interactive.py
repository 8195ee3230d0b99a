"""A frontend without HTTP (``--interactive``): router and views in this process, and a person at the terminal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dynamo_es.clock import Clock
from dynamo_es.frontend.main import BuildApp, FrontendSettings, process_metrics, recover, unless_stopped
from dynamo_es.frontend.terminal_chat import TerminalChat, Write, ready_model
from dynamo_es.frontend.tokenizer_backends import check_backend
from dynamo_es.log.base import EventLog
from dynamo_es.runtime.core import RuntimeCore


async def run_interactive(
    settings: FrontendSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    lines: AsyncIterator[str] | None,
    write: Write,
    model: str | None = None,
    log: EventLog | None = None,
    core: RuntimeCore | None = None,
    build: BuildApp | None = None,
    prompt: str = "",
) -> None:
    """Chat until ``lines`` end or ``stop`` is set, then give everything back.

    Args:
        model: Name of the model; None: the first that is ready.
        lines: What the person says; None: ``prompt``, once, of which only the answer is shown.
        write: Shows text.
        core, build: As ``run_frontend`` takes them.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    check_backend(settings.frontend)
    plan = settings.routing()
    given = core
    if core is None:
        core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    make = build if build is not None else partial(recover, settings, plan)
    metrics = process_metrics(core, settings.frontend.metrics_prefix)
    executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def chat() -> None:
        app = await make(core, metrics, executor)
        name = await ready_model(app.service.directory, model, write)
        chat = TerminalChat(app, settings.paths.chat, name, write)
        if lines is not None:
            await chat.run(lines)
        else:
            await chat.ask(prompt)

    try:
        await unless_stopped(stop, chat())
    finally:
        if given is None:
            await core.close()
        executor.shutdown(wait=False, cancel_futures=True)
