from __future__ import annotations

import asyncio

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.frontend.membership import settle_membership
from dynamo_es.frontend.prefill_pool import PrefillPool
from tests.unit.frontend.fakes import card


def decode(number=1, **changes):
    return card(instance_id=number, worker_type="decode", needs=[["prefill"]], **changes)


def prefill(number, component="prefill", **changes):
    return card(instance_id=number, worker_type="prefill", component=component, model_type="", **changes)


class Setup:
    def __init__(self, *cards, build=None):
        self.away = set()
        self.built = []
        self.show(*cards)
        self.pool = PrefillPool(lambda: self.membership, self.is_serving, build or self.build)

    def is_serving(self, one):
        return one.instance_id not in self.away

    def show(self, *cards):
        self.membership = settle_membership(cards, None, self.is_serving, lambda one: 0)

    async def build(self, endpoint, accepts):
        self.built.append(endpoint)
        self.accepts = accepts
        await asyncio.sleep(0)
        return ("router", endpoint)


async def test_the_router_is_built_once_when_it_is_first_asked_for():
    setup = Setup(decode(), prefill(2))
    assert setup.pool.built() is None
    assert (
        await asyncio.gather(*(setup.pool.router() for _ in range(3)))
        == [("router", ("ns", "prefill", "generate"))] * 3
    )
    assert len(setup.built) == 1
    assert setup.pool.built() == ("router", ("ns", "prefill", "generate"))


async def test_workers_may_come_and_go_without_another_router():
    setup = Setup(decode(), prefill(2))
    await setup.pool.router()
    assert [setup.accepts(number) for number in (1, 2, 3)] == [False, True, False]
    setup.show(decode(), prefill(3))
    assert [setup.accepts(number) for number in (2, 3)] == [False, True]
    setup.show(decode())
    assert await setup.pool.router() is None
    setup.show(decode(), prefill(4))
    await setup.pool.router()
    assert len(setup.built) == 1


async def test_one_that_takes_no_requests_is_none():
    setup = Setup(decode(), prefill(2))
    setup.away = {2}
    setup.show(decode(), prefill(2))
    assert await setup.pool.router() is None


async def test_the_endpoint_is_kept_and_others_are_told_once(caplog):
    setup = Setup(decode(), prefill(2, "a"))
    await setup.pool.router()
    for _ in range(2):
        setup.show(decode(), prefill(2, "a"), prefill(3, "b"), prefill(4, "b"))
        assert await setup.pool.router() == ("router", ("ns", "a", "generate"))
    assert caplog.text.count("prefill worker 3 is not used") == 1
    setup.show(decode(), prefill(3, "b"), prefill(4, "b"))
    assert await setup.pool.router() == ("router", ("ns", "b", "generate"))


async def test_workers_that_compute_their_own_prompts_have_no_pool():
    setup = Setup(card(instance_id=1), prefill(2))
    assert not setup.pool.wanted()
    assert await setup.pool.router() is None


@pytest.mark.parametrize(
    ("needs", "needed"), [([], False), ([["prefill"]], True), ([["prefill", "encode"], ["prefill"]], True),
                          ([["prefill"], ["encode"]], False)],
)  # fmt: skip
async def test_prefill_workers_are_needed_if_every_alternative_has_them(needs, needed):
    setup = Setup(card(instance_id=1, worker_type="decode", needs=needs))
    assert setup.pool.needed() is needed


async def test_a_router_that_cannot_be_built_is_tried_again_and_told(caplog):
    tries = []

    async def build(endpoint, accepts):
        tries.append(endpoint)
        if len(tries) == 1:
            raise ConfigError("no key")
        return "router"

    setup = Setup(decode(), prefill(2), build=build)
    assert await setup.pool.router() is None
    assert "no key" in caplog.text
    assert await setup.pool.router() == "router"


async def test_a_request_that_is_given_up_leaves_the_router_to_the_others():
    setup = Setup(decode(), prefill(2))
    first = asyncio.create_task(setup.pool.router())
    second = asyncio.create_task(setup.pool.router())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ("router", ("ns", "prefill", "generate"))
