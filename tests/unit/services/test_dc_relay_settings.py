"""What a relay watches, in Dynamo's words, and which models a data centre can serve (spec/services d.7 and g)."""

from __future__ import annotations

import re

import msgspec
import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.services.dc_relay.readiness import find_readiness
from dynamo_es.services.dc_relay.settings import RelayScope, RelaySettings
from schemas.registry import ModelCard

FACTS = read_model_facts(BUILTIN_MODEL)


def card(
    path: str = "ns.backend.generate", number: int = 1, *, role: str = "aggregated", needs=(), **fields
) -> ModelCard:
    made = make_card(
        FACTS, path.split("."), number, name="m", block_size=4, runtime_config={}, worker_type=role, needs=needs
    )
    return msgspec.structs.replace(made, **fields)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (RelaySettings(""), "dc_id must not be empty"),
        (RelaySettings(" "), "dc_id must not contain leading or trailing whitespace"),
        (RelaySettings("a\n"), "dc_id must not contain leading or trailing whitespace"),
        (RelaySettings("a\x00b"), "dc_id must be printable text of at most 256 bytes"),
        (RelaySettings("é" * 129), "dc_id must be printable text of at most 256 bytes"),
        (RelaySettings("a", RelayScope(("",))), "discovery namespaces must not be empty"),
        (RelaySettings("a", RelayScope((" n",))), "discovery namespaces must not contain surrounding whitespace"),
        (RelaySettings("a", RelayScope(None, (" ",))), "endpoint prefixes must not be empty"),
        (RelaySettings("a", RelayScope(None, ("p ",))), "endpoint prefixes must not contain surrounding whitespace"),
        (RelaySettings("a", RelayScope(("a",), ("b.c",))), "endpoint prefix b.c is outside the configured namespaces"),
        (RelaySettings("a", RelayScope(("a",), ("ab",))), "endpoint prefix ab is outside the configured namespaces"),
        (RelaySettings("a", publication_threshold=0), "publication_threshold must be positive"),
        (RelaySettings("a", publication_delay_ms=0), "publication_delay_ms must be positive"),
        (RelaySettings("a", recovery_attempt_timeout_ms=0), "recovery_attempt_timeout_ms must be positive"),
        (RelaySettings("", RelayScope(("",)), 0, 0, 0), "dc_id must not be empty"),
        (RelaySettings("a", RelayScope(("",)), 0, 0, 0), "discovery namespaces must not be empty"),
    ],
)
def test_wrong_settings_are_told_as_by_dynamo_and_in_its_order(settings: RelaySettings, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^KV DC Relay {re.escape(text)}$"):
        settings.check()


def test_good_settings_pass() -> None:
    RelaySettings("eu-west 1", RelayScope(("a", "b"), ("a", "b.c", "b.c.d"))).check()


@pytest.mark.parametrize(
    ("scope", "included"),
    [
        (RelayScope(), True),
        (RelayScope(("ns", "other")), True),
        (RelayScope(("n",)), False),
        (RelayScope(None, ("ns",)), True),
        (RelayScope(None, ("ns.backend",)), True),
        (RelayScope(None, ("ns.backend.generate",)), True),
        (RelayScope(None, ("ns.back",)), False),
        (RelayScope(None, ("ns/backend",)), False),
        (RelayScope(None, ("ns.backend.generate.x",)), False),
        (RelayScope(None, ("x", "ns.backend")), True),
    ],
)
def test_scopes_match_whole_parts_of_paths_as_in_dynamo(scope: RelayScope, included: bool) -> None:
    assert scope.includes(card()) is included


def readiness(cards, absent=()):
    found = find_readiness(cards, lambda each: each.instance_id not in absent)
    return {(entry.namespace, entry.model): entry for entry in found}


def test_a_model_is_ready_with_a_worker_that_takes_requests() -> None:
    own = [card(), card(number=2)]
    assert readiness(own)["ns", "m"].ready
    entry = readiness(own, absent={1})["ns", "m"]
    assert (entry.ready, entry.workers, entry.present, entry.missing) == (True, 1, ["aggregated"], [])
    entry = readiness(own, absent={1, 2})["ns", "m"]
    assert (entry.ready, entry.workers, entry.missing) == (False, 0, ["aggregated"])


def test_roles_need_each_other_across_endpoints_of_a_namespace() -> None:
    prefill = card("ns.prefill.generate", 1, role="prefill", needs=[["decode"]])
    decode = card("ns.backend.generate", 2, role="decode", needs=[["prefill", "encode"], ["prefill"]])
    assert readiness([prefill, decode])["ns", "m"].present == ["decode", "prefill"]
    assert readiness([prefill, decode])["ns", "m"].ready
    entry = readiness([prefill, decode], absent={1})["ns", "m"]
    assert (entry.ready, entry.missing) == (False, ["encode", "prefill"])
    # Needs of a worker that takes no requests count for nothing; its role is missing all the same.
    assert readiness([prefill, decode], absent={2})["ns", "m"].missing == ["decode"]
    elsewhere = card("other.prefill.generate", 3, role="prefill", needs=[["decode"]])
    assert not readiness([elsewhere, decode])["ns", "m"].ready


def test_a_card_without_a_role_turns_the_gate_off() -> None:
    legacy = card(number=1, role="")
    decode = card(number=2, role="decode", needs=[["prefill"]])
    assert readiness([legacy, decode])["ns", "m"].ready
    assert readiness([legacy, decode], absent={1})["ns", "m"].ready
    assert not readiness([legacy, decode], absent={1, 2})["ns", "m"].ready


def test_an_adapter_is_ready_with_its_model_and_a_worker_of_each_role_that_has_it() -> None:
    prefill = card("ns.prefill.generate", 1, role="prefill", needs=[["decode"]])
    decode = card("ns.backend.generate", 2, role="decode", needs=[["prefill"]], aliases=["b", "a"])
    on_decode = card("ns.backend.generate", 2, role="decode", suffix="l", display_name="lora", lora_name="lora")
    on_prefill = card("ns.prefill.generate", 1, role="prefill", suffix="l", display_name="lora", lora_name="lora")
    assert readiness([prefill, decode, on_decode])["ns", "m"].adapters == []
    found = readiness([prefill, decode, on_decode, on_prefill])
    assert list(found) == [("ns", "m")]
    assert (found["ns", "m"].adapters, found["ns", "m"].aliases) == (["lora"], ["a", "b"])
    assert readiness([prefill, decode, on_decode, on_prefill], absent={1})["ns", "m"].adapters == []
