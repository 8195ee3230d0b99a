"""Hundreds of streams at a time through one frontend, a tenth of them cut by the client: nothing of them is left."""

from __future__ import annotations

import random
from dataclasses import replace

from dynamo_es.frontend.server import serve
from dynamo_es.router.active_sequences import NO_LOAD, WorkerRank
from tests.support.open_things import open_things
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import served_fleet
from tests.support.stream_load import StreamLoad

STREAMS, TOKENS = 200, 24


async def test_many_streams_leave_nothing_behind() -> None:
    async with served_fleet(runtime=PATIENT) as fleet:
        await fleet.mock_worker(speedup_ratio=20.0, max_num_seqs=2 * STREAMS)
        server = await serve(fleet.app, replace(fleet.config, http_host="127.0.0.1", http_port=0))
        try:

            async def load(streams: int) -> StreamLoad:
                load = StreamLoad(
                    "127.0.0.1", server.port, "m", streams=streams, max_tokens=TOKENS, words=20, rng=random.Random(7)
                )
                await load.run(0.0)
                return load

            def is_idle() -> bool:
                ((_, engine),) = fleet.models.routers()
                (instance,) = fleet.core.registry.state.instances.values()
                return (
                    not fleet.app.service.running
                    and engine.router.open_requests == 0
                    and engine.router._sequences.load(WorkerRank(instance.instance_id, 0)) == NO_LOAD
                    and not fleet.views.requests.state.bookings
                )

            # What is made once is there before anything is counted.
            await load(4)
            await wait_for(is_idle)
            before = open_things()
            done = await load(STREAMS)
            assert len(done.told) == STREAMS
            assert sum(told.cut_after is not None for told in done.told) == STREAMS // 10
            assert done.faults() == []
            await wait_for(is_idle)
            await wait_for(lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)))
        finally:
            await server.shutdown()
