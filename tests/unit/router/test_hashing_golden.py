"""Hashing against results recorded from ai-dynamo-runtime 1.5.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.router.hashing import (
    block_seed,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
    hash_blocks,
    hash_prompt,
    lora_name_to_id,
    to_signed,
)
from dynamo_es.router.hashing_tracking import TrackingScope, compute_tracking_hashes, derive_tracking_seeds

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "router"
ERRORS = {kind.__name__: kind for kind in (TypeError, OverflowError, ValueError, Exception)}


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text(), object_hook=restore)


def restore(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["$bytes"]) if value.keys() == {"$bytes"} else value


HASHING = read("hashing.json")["cases"]
LORA_IDS = read("lora_ids.json")["cases"]
SEQUENCES = read("sequence_hashes.json")
KEYED = read("tracking_hash_keyed.json")


def assert_recorded(recorded: dict[str, Any], call: Any) -> None:
    if "ok" in recorded:
        assert call() == recorded["ok"]
        return
    with pytest.raises(ERRORS[recorded["error"]["type"]]) as caught:
        call()
    assert type(caught.value) is ERRORS[recorded["error"]["type"]]
    assert str(caught.value) == recorded["error"]["message"]


@pytest.mark.parametrize("case", HASHING, ids=[case["name"] for case in HASHING])
def test_block_hashes_and_errors_are_those_of_dynamo(case: dict[str, Any]) -> None:
    assert_recorded(case["result"], lambda: compute_block_hash_for_seq(**case["args"]))


@pytest.mark.parametrize("case", LORA_IDS, ids=[repr(case["lora_name"])[:40] for case in LORA_IDS])
def test_lora_ids_and_errors_are_those_of_dynamo(case: dict[str, Any]) -> None:
    assert_recorded(case["result"], lambda: lora_name_to_id(case["lora_name"]))


def prompt_of(request: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Token ids to hash and multimodal hashes by block: routing token ids win where they are given."""
    routing = request.get("mm_routing_info", {})
    infos = routing.get("block_mm_infos", request.get("block_mm_infos", []))
    objects = [[item["mm_hash"] for item in info["mm_objects"]] if info else [] for info in infos]
    return routing.get("routing_token_ids") or request["token_ids"], objects


@pytest.mark.parametrize("case", SEQUENCES["cases"], ids=range(len(SEQUENCES["cases"])))
def test_sequence_hashes_are_those_of_dynamo(case: dict[str, Any]) -> None:
    request = case["request"]
    tokens, objects = prompt_of(request)
    block_hashes = hash_blocks(
        tokens,
        SEQUENCES["block_size"],
        block_seed(request.get("lora_name"), request.get("cache_salt")),
        is_eagle=request.get("is_eagle", False),
        mm_hashes=objects,
    )
    assert [to_signed(value) for value in compute_sequence_hashes(block_hashes)] == case["sequence_hashes_i64"]


@pytest.mark.parametrize(
    ("scope", "case"),
    [(scope, case) for scope in KEYED["scopes"] for case in scope["cases"]],
    ids=range(sum(len(scope["cases"]) for scope in KEYED["scopes"])),
)
def test_keyed_tracking_hashes_are_those_of_dynamo(scope: dict[str, Any], case: dict[str, Any]) -> None:
    request = case["request"]
    tokens, objects = prompt_of(request)
    tracking = TrackingScope(
        model_name=scope["model_name"],
        routing_group=scope["routing_group"],
        block_size=KEYED["block_size"],
        cache_namespace=request.get("cache_salt"),
        lora_name=request.get("lora_name"),
        is_eagle=request.get("is_eagle", False),
    )
    seeds = derive_tracking_seeds(bytes.fromhex(KEYED["key_hex"]), KEYED["key_id"], tracking)
    hashes = compute_tracking_hashes(tokens, tracking, seeds, objects)
    assert [to_signed(value) for value in hashes] == case["sequence_hashes_i64"]


def test_keyed_seeds_of_a_published_vector() -> None:
    scope = TrackingScope("model-a", "tenant-a", 4, "cache-a", "adapter-a")
    seeds = derive_tracking_seeds(b"\x5a" * 32, "2026-01", scope)
    assert seeds == (18195031674076271517, 8617989506309882921)
    assert compute_tracking_hashes(range(12), scope, seeds) == [
        4363769719052127296,
        14998523962162619427,
        13920914207884994756,
    ]


@pytest.mark.parametrize(
    ("lora_name", "cache_namespace", "seed", "result"),
    [
        (None, None, 1337, 14643705804678351452),
        ("a", None, 16629034431890740056, 17680866786467819158),
        (None, "a", 15201566949650181209, 12074216714505932737),
        ("b", "a", 3049178521186349208, 13248150365443146394),
    ],
)
def test_seeds_of_adapter_and_namespace(
    lora_name: str | None, cache_namespace: str | None, seed: int, result: int
) -> None:
    assert block_seed(lora_name, cache_namespace) == seed
    assert hash_blocks([1, 2, 3, 4], 4, seed) == [result]


def test_prompt_hashes_of_a_published_vector() -> None:
    tokens_hashes, sequence_hashes = hash_prompt(range(10), 4)
    assert tokens_hashes == [9143094415614847814, 12124091508212882195]
    assert [to_signed(value) for value in sequence_hashes] == [9143094415614847814, -8936425687869117083]
