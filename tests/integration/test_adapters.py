"""LoRA adapters as models of a frontend: found in the registry, answered by the workers that hold them."""

from __future__ import annotations

import dataclasses

import msgspec

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.engines.lora.errors import AdapterNotHere
from dynamo_es.router.hashing import block_seed, hash_prompt
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.columns import unpack_u64
from schemas.registry import key_model
from schemas.requests import Routed
from tests.integration.test_disaggregated_serving import events
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import COMPLETIONS, served_fleet

PROMPT = list(range(1, 33))
WHERE = ("dynamo", "backend", "generate")


class Holders:
    def __init__(self, fleet):
        self.fleet, self.asked, self.runtimes, self.gone = fleet, [], [], set()

    async def start(self, count):
        for _ in range(count):
            place = len(self.runtimes)

            async def answer(request, context, place=place):
                name = request["routing"].get("lora_name")
                self.asked.append((place, request["model"], name))
                if name is not None and place in self.gone:
                    raise AdapterNotHere(name)
                yield Batch([{"token_ids": [65], "finish_reason": "stop"}])

            self.runtimes.append(await self.fleet.worker(answer))

    async def load(self, place, name, **more):
        core = self.runtimes[place].core
        card = make_card(
            read_model_facts(BUILTIN_MODEL), WHERE, core.instance_id, name=name, block_size=16, runtime_config={}
        )
        card = msgspec.structs.replace(card, suffix=name, lora_name=name, **more)
        await core.registration.register(key_model(*WHERE, core.instance_id, name), card)

    async def unload(self, place, name):
        core = self.runtimes[place].core
        await core.registration.unregister(key_model(*WHERE, core.instance_id, name))


async def test_an_adapter_is_a_model_of_the_workers_that_hold_it():
    config = FrontendConfig(router_mode="kv", active_prefill_tokens_threshold=100_000)
    async with served_fleet(config=config, runtime=PATIENT) as fleet:
        workers = Holders(fleet)
        await workers.start(2)
        await workers.load(1, "tuned", aliases=["t"])
        await wait_for(lambda: "tuned" in fleet.models.statuses())
        await wait_for(lambda: len(fleet.models.find("m").engine.router._candidates()) == 2)
        for name in ("tuned", "t", "tuned"):
            reply = await fleet.ask(COMPLETIONS, model=name, prompt=PROMPT, max_tokens=1)
            assert (reply.status, reply.json()["model"]) == (200, "tuned")
        assert set(workers.asked) == {(1, "tuned", "tuned")}
        workers.asked.clear()
        for _ in range(4):
            assert (await fleet.ask(COMPLETIONS, prompt=PROMPT, max_tokens=1)).json()["model"] == "m"
        assert {(model, name) for _, model, name in workers.asked} == {("m", None)}
        routed = [event for event in await events(fleet, 7) if isinstance(event, Routed)]
        own, base = hash_prompt(PROMPT, 16, block_seed("tuned")), hash_prompt(PROMPT, 16)
        assert {tuple(unpack_u64(event.sequence_hashes)) for event in routed} == {tuple(own[1]), tuple(base[1])}
        # One router: the load of both names is one.
        assert fleet.models.find("m").engine.router.open_requests == 0
        names = [entry["id"] for entry in (await fleet.get("/v1/models")).json()["data"]]
        assert set(names) == {"m", "tuned", "t"}
        ready = (await fleet.get("/v1/models/tuned/ready")).json()
        assert ready["namespaces"]["dynamo"]["worker_types"]["aggregated"]["workers"] == 1
        thresholds = (await fleet.get("/busy_threshold")).json()["thresholds"]
        assert {entry["model"] for entry in thresholds} == {"m", "tuned"}
        fleet.models.set_thresholds(
            "tuned", dataclasses.replace(fleet.models.thresholds()["m"], active_prefill_tokens=9)
        )
        assert fleet.models.thresholds()["m"].active_prefill_tokens == 9


async def test_a_request_that_comes_when_its_adapter_has_gone_is_carried_on_to_another_holder():
    """The frontend learns of it a moment later; until then it is nobody's fault."""
    config = FrontendConfig(router_mode="round-robin", migration_limit=1)
    async with served_fleet(config=config, runtime=PATIENT) as fleet:
        workers = Holders(fleet)
        await workers.start(2)
        for place in range(2):
            await workers.load(place, "tuned")
        workers.gone.add(0)
        await wait_for(lambda: "tuned" in fleet.models.statuses())
        await wait_for(lambda: len(fleet.models._adapters._known["tuned"].holders) == 2)
        for _ in range(4):
            assert (await fleet.ask(COMPLETIONS, model="tuned", prompt=PROMPT, max_tokens=1)).status == 200
        assert {place for place, _, name in workers.asked if name} == {0, 1}
        # The worker itself is well.
        workers.asked.clear()
        for _ in range(2):
            assert (await fleet.ask(COMPLETIONS, prompt=PROMPT, max_tokens=1)).status == 200
        assert {place for place, _, _ in workers.asked} == {0, 1}
        workers.gone.add(1)
        assert (await fleet.ask(COMPLETIONS, model="tuned", prompt=PROMPT, max_tokens=1)).status == 503


async def test_adapters_come_and_go_with_what_holds_them():
    async with served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet:
        workers = Holders(fleet)
        await workers.start(2)
        for place in range(2):
            await workers.load(place, "tuned")
        await wait_for(lambda: "tuned" in fleet.models.statuses())
        await workers.unload(0, "tuned")
        await wait_for(lambda: len(fleet.models._adapters._known["tuned"].holders) == 1)
        for _ in range(3):
            assert (await fleet.ask(COMPLETIONS, model="tuned", prompt=PROMPT, max_tokens=1)).status == 200
        assert {place for place, _, _ in workers.asked} == {1}
        await workers.unload(1, "tuned")
        await wait_for(lambda: "tuned" not in fleet.models.statuses())
        reply = await fleet.ask(COMPLETIONS, model="tuned", prompt=PROMPT, max_tokens=1)
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert (await fleet.ask(COMPLETIONS, prompt=PROMPT, max_tokens=1)).status == 200
        await workers.load(1, "tuned")
        await wait_for(lambda: "tuned" in fleet.models.statuses())
        workers.runtimes[1].shutdown()
        await workers.runtimes[1].close()
        await wait_for(lambda: "tuned" not in fleet.models.statuses())
