"""Tasks that run as long as their process: what counts as a death, and what is told of it."""

from __future__ import annotations

import asyncio
import logging

from dynamo_es.background import BackgroundTasks


async def dies():
    raise KeyError("the text may hold anything")


async def lasts():
    await asyncio.Event().wait()


async def test_DISC_10_a_task_that_dies_is_noted_with_its_traceback_in_the_log(caplog):
    tasks = BackgroundTasks()
    died = tasks.spawn(dies(), "lease-monitor")
    await asyncio.wait((died,))
    await asyncio.sleep(0)
    assert [str(dead) for dead in tasks.dead] == [
        "background task lease-monitor died of KeyError; see the log, and start the process again"
    ]
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[0]) == (logging.CRITICAL, KeyError)


async def test_an_end_by_whoever_began_it_is_no_death():
    tasks = BackgroundTasks()
    ended = [tasks.spawn(lasts(), "a"), tasks.spawn(asyncio.sleep(0), "b")]
    await asyncio.sleep(0)
    ended[0].cancel()
    await asyncio.wait(ended)
    await asyncio.sleep(0)
    assert not tasks.dead
    assert not tasks.died


async def test_of_many_that_die_a_few_are_named_and_all_are_counted_by_kind():
    tasks = BackgroundTasks()
    await asyncio.wait([tasks.spawn(dies(), f"connection-{number}", "connection") for number in range(50)])
    await asyncio.sleep(0)
    assert tasks.died == {"connection": 50}
    assert len(tasks.dead) == 20
