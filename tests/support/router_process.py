"""A router that answers one question a line: ``python -m tests.support.router_process URL NAMESPACE STATE_DIR``.

In: ``{"token_ids": [...], "ends": {"topic": {"0": end}}}``; it waits until its index has everything below the ends.
Out: ``{"<worker_id>:<rank>": device blocks}``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, StateConfig
from dynamo_es.log.base import Position
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.runtime import DistributedRuntime
from dynamo_es.runtime.views import RoutingViews
from tests.support.runtimes import FAST

BLOCK_SIZE = 32
ENDPOINT = "dynamo.backend.generate"


async def answer(views: RoutingViews, router: KvRouter, line: str) -> dict[str, int]:
    question = json.loads(line)
    for topic, ends in question["ends"].items():
        for partition, end in ends.items():
            if end:
                await views.kv_index.wait_applied(Position(topic, int(partition), end - 1), 20)
    scores = await router.get_overlap_scores(question["token_ids"])
    return {f"{row['worker_id']}:{row['dp_rank']}": row["device_blocks"] for row in scores["workers"]}


async def main(url: str, namespace: str, state_dir: str) -> None:
    settings = RuntimeSettings(
        LogConfig(url=url, namespace=namespace), StateConfig(state_dir=state_dir, flush_interval_s=0.02), FAST, "router"
    )
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", settings=settings, clock=SystemClock(), rng=random.SystemRandom())
    await runtime.core.start()
    views = RoutingViews(runtime.core)
    await views.start()
    await views.wait_caught_up(20)
    router = KvRouter(runtime.endpoint(ENDPOINT), BLOCK_SIZE, views=views)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(views, router, line)), flush=True)
    await runtime.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
