"""What the selection service is asked with is refused in Dynamo's words (answers of release 1.5.1)."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.selection_requests import parse_patch, parse_query, parse_reservation, parse_select, parse_worker

TOKENS = list(range(16))
SETTINGS = KvRouterSettings()
MEMBERS = [
    ({"model_name": 5}, "unexpected type: 'int' object cannot be converted to 'PyString'"),
    ({"model_name": None}, "unexpected type: 'NoneType' object cannot be converted to 'PyString'"),
    ({"selection_id": 5}, "unexpected type: 'int' object cannot be converted to 'PyString'"),
    ({"pinned_worker": [2, 0]}, "unexpected type: 'list' object cannot be converted to 'Mapping'"),
    ({"pinned_worker": {"worker_id": 1}}, "missing field `dp_rank`"),
    ({"allowed_worker_ids": 5}, "unexpected type: 'int' object cannot be converted to 'Sequence'"),
    ({"allowed_worker_ids": "x"}, "TypeError: 'str' object cannot be interpreted as an integer"),
    ({"routing_constraints": None}, "unexpected type: 'NoneType' object cannot be converted to 'Mapping'"),
    (
        {"routing_constraints": {"required_taints": None}},
        "unexpected type: 'NoneType' object cannot be converted to 'Sequence'",
    ),
    (
        {"routing_constraints": {"required_taints": [5]}},
        "unexpected type: 'int' object cannot be converted to 'PyString'",
    ),
    ({"routing_constraints": {"preferred_taints": {"a": "x"}}}, "TypeError: must be real number, not str"),
    ({"priority_jump": "x"}, "TypeError: must be real number, not str"),
    ({"expected_output_tokens": -1}, "OverflowError: out of range integral type conversion attempted"),
    ({"strict_priority": 2**32}, "OverflowError: out of range integral type conversion attempted"),
    ({"strict_priority": 2**70}, "OverflowError: Python int too large to convert to C long"),
    ({"session_id": 5}, "unexpected type: 'int' object cannot be converted to 'PyString'"),
    ({"affinity_target": 5}, "unexpected type: 'int' object cannot be converted to 'Mapping'"),
    ({"affinity_target": {"dp_rank": 0}}, "missing field `worker_id`"),
    ({"other": object()}, "unsupported type object"),
    ({"other": [{"deep": {1, object()}}]}, "unsupported type object"),
    ({"other": [bytearray(b"x")]}, "unexpected type: 'bytearray' object cannot be converted to 'PyBytes'"),
    ({5: 1}, "dict keys must have type str"),
    (
        {"model_name": "\ud800"},
        "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed",
    ),
    ({"router_config_override": 5}, "unexpected type: 'int' object cannot be converted to 'Mapping'"),
    ({"router_config_override": {"overlap_score_credit": "x"}}, "TypeError: must be real number, not str"),
    (
        {"router_config_override": {"overlap_score_credit": -1}},
        "overlap_score_credit must be a finite, non-negative number",
    ),
]
PROMPTS = [
    ({"token_ids": "abc"}, 'invalid type: string "abc", expected a sequence'),
    ({"token_ids": b"abcd"}, "invalid type: byte array, expected a sequence"),
    ({"token_ids": {}}, "invalid type: map, expected a sequence"),
    ({"token_ids": [-1]}, "invalid value: integer `-1`, expected u32"),
    ({"token_ids": [2**32]}, "invalid value: integer `4294967296`, expected u32"),
    ({"token_ids": [2**64]}, "invalid type: integer `18446744073709551616` as u128, expected any value"),
    ({"token_ids": [2**200]}, "OverflowError: Python int too large to convert to C long"),
    ({"token_ids": [-(2**64)]}, "invalid type: integer `-18446744073709551616` as i128, expected any value"),
    ({"token_ids": [True]}, "invalid type: boolean `true`, expected u32"),
    ({"token_ids": 1e16}, "invalid type: floating point `10000000000000000.0`, expected a sequence"),
    ({"token_ids": float("nan")}, "invalid type: floating point `NaN`, expected a sequence"),
    ({"token_ids": 'a"\n'}, 'invalid type: string "a\\"\\n", expected a sequence'),
    ({"token_ids": [1.5]}, "invalid type: floating point `1.5`, expected u32"),
    ({"token_ids": [None]}, "invalid type: unit value, expected u32"),
    ({"token_ids": ["a"]}, 'invalid type: string "a", expected u32'),
    ({"token_ids": TOKENS, "lora_name": 5}, "invalid type: integer `5`, expected a string"),
    ({"token_ids": TOKENS, "cache_salt": [1]}, "invalid type: sequence, expected a string"),
    ({"token_ids": TOKENS, "is_eagle": 5}, "invalid type: integer `5`, expected a boolean"),
    ({"isl_tokens": -1}, "invalid value: integer `-1`, expected usize"),
    ({"isl_tokens": "a"}, 'invalid type: string "a", expected usize'),
    ({"block_hashes": [2**63]}, "invalid value: integer `9223372036854775808`, expected i64"),
    ({"mm_routing_info": 5}, "invalid type: integer `5`, expected struct MmRoutingInfoRequest"),
    ({"mm_routing_info": {}}, "missing field `routing_token_ids`"),
    (
        {"mm_routing_info": {"routing_token_ids": [], "block_mm_infos": None}},
        "invalid type: unit value, expected a sequence",
    ),
    ({"mm_routing_info": []}, "invalid length 0, expected struct MmRoutingInfoRequest with 2 elements"),
    ({"mm_routing_info": [[], [], 1]}, "invalid length 3, expected 2 elements in sequence"),
    ({"mm_routing_info": {"routing_token_ids": [], 0: []}}, "duplicate field `routing_token_ids`"),
    ({"mm_routing_info": {300: 1}}, "invalid type: integer `300`, expected field identifier"),
    ({"cache_salt": b"\xff"}, "invalid value: byte array, expected a string"),
    ({"block_mm_infos": [[]]}, "invalid length 0, expected struct BlockExtraInfo with 1 element"),
    ({"block_mm_infos": [[[[5, [[1, 2, 3]]]]]]}, "invalid length 3, expected 2 elements in sequence"),
    ({"block_mm_infos": [[[[5, [7]]]]]}, "invalid type: integer `7`, expected a tuple of size 2"),
    ({"block_mm_infos": 5}, "invalid type: integer `5`, expected a sequence"),
    ({"block_mm_infos": [5]}, "invalid type: integer `5`, expected struct BlockExtraInfo"),
    ({"block_mm_infos": [{"bad": 1}]}, "missing field `mm_objects`"),
    ({"block_mm_infos": [{"mm_objects": 5}]}, "invalid type: integer `5`, expected a sequence"),
    ({"block_mm_infos": [{"mm_objects": [{"mm_hash": 5}]}]}, "missing field `offsets`"),
    (
        {"block_mm_infos": [{"mm_objects": [{"mm_hash": -5, "offsets": []}]}]},
        "invalid value: integer `-5`, expected u64",
    ),
    (
        {"block_mm_infos": [{"mm_objects": [{"mm_hash": 5, "offsets": [[1]]}]}]},
        "invalid length 1, expected a tuple of size 2",
    ),
]


def refusal(parse: Any, *args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse(*args)
    assert type(caught.value) is ValueError
    return str(caught.value)


@pytest.mark.parametrize(("members", "text"), MEMBERS + PROMPTS)
def test_a_selection_is_refused(members: dict[str, Any], text: str) -> None:
    assert refusal(parse_select, {"token_ids": TOKENS, **members}, SETTINGS) == text


@pytest.mark.parametrize(("members", "text"), PROMPTS)
def test_prompts_are_refused_wherever_they_stand(members: dict[str, Any], text: str) -> None:
    assert refusal(parse_query, members, SETTINGS) == text
    assert refusal(parse_reservation, {"selection_id": "a", **members}, SETTINGS) == text


def test_members_of_the_request_are_refused_in_their_order_before_the_prompt_and_what_is_missing_last() -> None:
    wrong = {"token_ids": "x", "dp_rank": -1, "worker_id": "y"}
    assert refusal(parse_reservation, wrong, SETTINGS).startswith("OverflowError: out of range")
    assert refusal(parse_reservation, dict(reversed(wrong.items())), SETTINGS).startswith("TypeError: 'str' object")
    assert refusal(parse_reservation, {"token_ids": "x"}, SETTINGS) == "missing field `selection_id`"
    assert refusal(parse_reservation, {"token_ids": [object()], **wrong}, SETTINGS).startswith("OverflowError")
    assert refusal(parse_reservation, {"other": object(), **wrong}, SETTINGS) == "unsupported type object"


def test_a_prompt_nested_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert refusal(parse_query, {"other": endless}, SETTINGS) == "nested deeper than 64 levels"


def test_texts_may_be_bytes_sets_may_be_lists_and_structs_may_be_lists_of_their_members() -> None:
    prompt = {"lora_name": b"a", "cache_salt": b"b", "mm_routing_info": (TOKENS, [[[[7, [(0, 1)]]]]])}
    query = parse_query(prompt, SETTINGS).prompt
    assert (query.lora_name, query.cache_salt, list(query.token_ids or ()), query.mm_hashes) == (
        "a",
        "b",
        TOKENS,
        [[7]],
    )
    request = parse_select({"token_ids": TOKENS, "allowed_worker_ids": {1, 2}}, SETTINGS)
    assert request.routing.allowed_worker_ids == {1, 2}


def test_a_reservation_has_settings_of_its_own() -> None:
    override = {"assume_kv_reuse": False}
    request = parse_reservation({"selection_id": "a", "router_config_override": override}, SETTINGS)
    assert not request.query.settings.router_assume_kv_reuse
    assert (request.query.partition.model_name, request.expected_output_tokens) == ("default", None)


@pytest.mark.parametrize("parse", [parse_worker, parse_patch, lambda value: parse_reservation(value, SETTINGS)])
@pytest.mark.parametrize(("value", "kind"), [(5, "int"), (None, "NoneType"), ([1], "list")])
def test_only_objects_are_read(parse: Any, value: Any, kind: str) -> None:
    assert refusal(parse, value) == f"unexpected type: '{kind}' object cannot be converted to 'Mapping'"


def test_optional_members_may_be_none_and_unknown_ones_any_plain_data() -> None:
    names = ("priority_jump", "strict_priority", "allowed_worker_ids", "pinned_worker", "lora_name")
    none = dict.fromkeys((*names, "router_config_override"))
    request = parse_select({"token_ids": range(16), "advisory": {"a": [1.5, b"x", {2}]}, **none}, SETTINGS)
    assert list(request.query.prompt.token_ids or ()) == TOKENS
    assert request.routing.allowed_worker_ids is None
    assert request.query.settings is SETTINGS


def test_routing_tokens_of_a_multimodal_prompt_stand_for_it() -> None:
    info = {"routing_token_ids": [9, 9], "block_mm_infos": [{"mm_objects": [{"mm_hash": 7, "offsets": [[0, 1]]}]}]}
    prompt = parse_query({"token_ids": TOKENS, "block_mm_infos": [], "mm_routing_info": info}, SETTINGS).prompt
    assert (list(prompt.token_ids or ()), prompt.mm_hashes) == ([9, 9], [[7]])


def test_signed_hashes_are_taken_as_their_bits() -> None:
    prompt = parse_query({"block_hashes": [1], "sequence_hashes": [-2], "isl_tokens": 3}, SETTINGS).prompt
    assert list(prompt.sequence_hashes or ()) == [2**64 - 2]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"kv_events_endpoints": {"0": "tcp://a:1"}}, "TypeError: 'str' object cannot be interpreted as an integer"),
        ({"taints": None}, "unexpected type: 'NoneType' object cannot be converted to 'Sequence'"),
        ({"kv_events_endpoints": None}, "unexpected type: 'NoneType' object cannot be converted to 'Mapping'"),
        ({"topology_domains": None}, "unexpected type: 'NoneType' object cannot be converted to 'Mapping'"),
        ({"kv_transfer_enforcement": 5}, "expected either a str or dict for enum"),
        ({"kv_transfer_enforcement": {}}, "expected tagged enum dict to have exactly 1 key"),
        ({"kv_transfer_enforcement": "x"}, "unknown variant `x`, expected `required` or `preferred`"),
        ({"topology_domains": {"zone": 5}}, "unexpected type: 'int' object cannot be converted to 'PyString'"),
        ({"block_size": -1}, "OverflowError: out of range integral type conversion attempted"),
        ({"total_kv_blocks": -1}, "OverflowError: can't convert negative int to unsigned"),
        ({"total_kv_blocks": 2**64}, "OverflowError: int too big to convert"),
        ({"kv_transfer_preferred_weight": 10**400}, "OverflowError: int too large to convert to float"),
    ],
)
def test_a_worker_is_refused(members: dict[str, Any], text: str) -> None:
    assert refusal(parse_worker, {"worker_id": 1, **members}) == text


def test_a_worker_is_read() -> None:
    spec = parse_worker(
        {
            "worker_id": 1,
            "other": object(),
            "taints": {"a"},
            "kv_transfer_enforcement": {"required": 0},
            "kv_transfer_preferred_weight": 0.1,
            "is_eagle": [1],
        }
    )
    assert (spec.taints, spec.kv_transfer_enforcement, spec.is_eagle) == ({"a"}, "required", True)
    # As 32 bits hold it.
    assert spec.kv_transfer_preferred_weight == 0.10000000149011612
    assert parse_worker({"worker_id": 1, "kv_transfer_preferred_weight": -1e300}).kv_transfer_preferred_weight == -inf


def test_a_patch_changes_what_it_says_and_nothing_for_none() -> None:
    patch = {"endpoint": None, "taints": None, "block_size": 8, "worker_id": "x", "model_name": 5, "routing_group": 5}
    assert parse_patch(patch) == {"block_size": 8}
    assert parse_patch({"taints": []}) == {"taints": frozenset()}
