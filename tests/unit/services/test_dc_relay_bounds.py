"""A relay tells no more than readers and the topic take."""

from __future__ import annotations

from dynamo_es.services.dc_relay import told_bounds
from dynamo_es.services.dc_relay.pools import PoolMembers
from dynamo_es.services.dc_relay.told_bounds import bound_models, bound_pools
from schemas.codec import TopicCodec
from schemas.dc_relay import DC_RELAY, LoadSignal, ModelReadiness, PoolStatus, RelayPool
from streams.dc_relay import MAX_MODELS, MAX_POOLS, DcRelayFold
from streams.testing import FoldDriver
from tests.support.relay_stream import chunk, pool, status

LARGE = LoadSignal(2**64 - 1, 2**64 - 1)


def members(*pools: RelayPool, roles: tuple[str, ...] = ("aggregated",)) -> dict[RelayPool, PoolMembers]:
    return {each: PoolMembers(each, roles=set(roles)) for each in pools}


def ready(model: str, aliases=(), adapters=()) -> ModelReadiness:
    return ModelReadiness("ns", model, True, 1, ["aggregated"], [], list(aliases), list(adapters))


def test_what_fits_is_told_as_it_is() -> None:
    found = members(pool("a"), pool("b"))
    assert bound_pools(found) == (found, 0)
    models = [ready("m", ["alias"], ["adapter"])]
    assert bound_models(models) == (models, 0, 0)


def test_readers_take_whatever_pools_are_told() -> None:
    many_models = members(*(pool(model=f"model-{number:04}") for number in range(MAX_MODELS + 20)))
    many_pools = members(*(pool(f"component-{number:04}") for number in range(MAX_POOLS + 30)))
    long_names = members(*(pool("c" * 4000, f"{number:03}") for number in range(150)), pool("x" * 9000))
    for found, left_out in ((many_models, 20), (many_pools, 30), (long_names, None)):
        told, left = bound_pools(found)
        assert left == len(found) - len(told)
        assert left_out in (None, left)
        reader = FoldDriver(DcRelayFold())
        made = status("x" * 256, 1, 0)
        made.pools = [PoolStatus(each, ["aggregated"], True, *[2**64 - 1] * 3, *[LARGE] * 5) for each in told]
        reader.feed(made)
        for seq, each in enumerate(told):
            reader.feed(chunk("x" * 256, 1, seq + 1, each, 0, 1))
        assert not reader.rejected
        assert len(TopicCodec(DC_RELAY).encode(made)) < told_bounds.MAX_POOLS_BYTES
    assert 80 < len(told) < 120


def test_the_longest_status_that_can_be_is_one_that_the_topic_takes() -> None:
    adapters = [f"organisation/adapter-of-customer-{number:06d}-{'x' * 80}" for number in range(10_000)]
    models, left_models, left_names = bound_models([ready("m", [], adapters), ready("n")])
    assert [entry.model for entry in models] == ["m", "n"]
    assert left_models == 0
    assert left_names == len(adapters) - len(models[0].adapters) > 0
    told, _ = bound_pools(members(*(pool("c" * 4000, f"{number:03}") for number in range(150))))
    made = status("x" * 256, 2**64 - 1, 2**64 - 1)
    made.pools = [PoolStatus(each, ["aggregated"], True, *[2**64 - 1] * 3, *[LARGE] * 5) for each in told]
    made.models = models
    assert 900_000 < len(TopicCodec(DC_RELAY).encode(made)) <= DC_RELAY.max_value_bytes


def test_of_too_many_models_the_first_ones_are_told_without_their_names() -> None:
    models, left_models, left_names = bound_models(
        [ready(f"{number:04}" + "x" * 600, ["a" * 9]) for number in range(1000)]
    )
    assert 800 < len(models) < 1000
    assert left_models == 1000 - len(models)
    assert left_names + sum(len(entry.aliases) for entry in models) == len(models)
