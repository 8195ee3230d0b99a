"""The JSON form of ``KvRouterConfig``, read as strictly as Dynamo reads it and refused in its words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamo_es.router.strict_json import JsonCursor, Member, Shape, UnplacedRefusal

_U32_LIMIT = 2**32
_U64_LIMIT = 2**64
_EOF_VALUE = "EOF while parsing a value"
_BOOLEANS = {b"t": b"true", b"f": b"false"}
# Belonged to transports that Dynamo once had; a configuration that still names them is none the worse for it.
_IGNORED = ("durable_kv_events", "router_snapshot_threshold", "router_reset_states", "skip_initial_worker_wait")


class _ConfigCursor(JsonCursor):
    """Reads values of a configuration; a member with an unknown name is refused.

    A part of the strict reader that stands in a module of its own, hence its use of the reader's inner steps.
    """

    def read_boolean(self) -> bool:
        mark = self.next_mark() or self.refuse(_EOF_VALUE)
        if mark not in _BOOLEANS:
            self.refuse_type("a boolean")
        self._identifier(_BOOLEANS[mark])
        return mark == b"t"

    def read_real(self) -> float:
        mark = self.next_mark() or self.refuse(_EOF_VALUE)
        if not (mark == b"-" or mark.isdigit()):
            self.refuse_type("f64")
        return float(self._number())

    def read_string(self, expected: str) -> str:
        mark = self.next_mark() or self.refuse(_EOF_VALUE)
        if mark != b'"':
            self.refuse_type(expected)
        return self._string()

    def read_word(self, known: Sequence[str]) -> str:
        mark = self.next_mark() or self.refuse(_EOF_VALUE)
        if mark != b'"':
            self.refuse("expected value")
        word = self._string()
        if word not in known:
            self.refuse(f"unknown variant `{word}`, {expected_names(known)}", 0)
        return word

    def _members_of_object(self, shape: Shape) -> list[Any]:
        found: dict[str, Any] = {}
        first = True
        while self._another(b"{", first=first):
            first = False
            name = self._string()
            if name not in shape.places:
                self.refuse(f"unknown field `{name}`, {expected_names(list(shape.places))}", 0)
            if name in found:
                raise UnplacedRefusal(f"duplicate field `{name}`")
            self._colon()
            found[name] = shape.members[shape.places[name]].read(self)
        return [found.get(member.name, member.default) for member in shape.members]


def expected_names(names: Sequence[str]) -> str:
    """What a refusal says of the names that there are."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) == 1:
        return f"expected {quoted[0]}"
    return f"expected {quoted[0]} or {quoted[1]}" if len(quoted) == 2 else f"expected one of {', '.join(quoted)}"


def read_config_json(text: str) -> dict[str, Any]:
    """The members that ``text`` sets, by name.

    Raises:
        ValueError: It is no such JSON: what is wrong, and where.
    """
    shape = _shape()
    cursor = _ConfigCursor(text.encode())
    values = cursor.read_struct(shape)
    cursor.end()
    given = {member.name: value for member, value in zip(shape.members, values, strict=True) if value is not None}
    if given.get("durable_kv_events"):
        raise ValueError("durable_kv_events=true is not supported by this runtime")
    return {name: value for name, value in given.items() if name not in _IGNORED}


def _shape() -> Shape:
    """All members in Dynamo's order. One that is absent or null where it may be is None."""
    boolean, real, integer = _ConfigCursor.read_boolean, _ConfigCursor.read_real, _integer("u32", _U32_LIMIT)
    text, path = _string("a string"), _string("path string")
    return Shape(
        "KvRouterConfigSerde",
        *_members(real, "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale"),
        *_members(real, "decode_active_request_weight"),
        *_members(_optional(real), "overlap_score_weight"),
        *_members(real, "host_cache_hit_weight", "disk_cache_hit_weight", "router_temperature"),
        *_members(boolean, "use_kv_events", "durable_kv_events", "router_replica_sync"),
        *_members(boolean, "router_track_active_blocks", "router_track_output_blocks", "router_assume_kv_reuse"),
        *_members(boolean, "router_track_prefill_tokens"),
        *_members(_word("public-xxh3-v1", "keyed-xxh3-v1"), "router_tracking_hash"),
        *_members(_optional(path), "router_tracking_key_file"),
        *_members(_optional(text), "router_tracking_key_id"),
        *_members(_word("none", "aic"), "router_prefill_load_model"),
        *_members(_optional(integer), "router_snapshot_threshold"),
        *_members(boolean, "router_reset_states"),
        *_members(real, "router_ttl_secs"),
        *_members(_optional(real), "router_queue_threshold"),
        *_members(_optional(text), "router_policy_config"),
        *_members(integer, "router_event_threads"),
        *_members(boolean, "skip_initial_worker_wait"),
        *_members(_word("fcfs", "lcfs", "wspt"), "router_queue_policy"),
        *_members(boolean, "use_remote_indexer", "serve_indexer"),
        *_members(real, "shared_cache_multiplier"),
        *_members(_word("none", "hicache"), "shared_cache_type"),
        *_members(_optional(real), "router_predicted_ttl_secs"),
        *_members(boolean, "conditional_disagg_enabled"),
        *_members(_word("isl_bounding", "prefill_load", "isl_or_load"), "conditional_disagg_policy"),
        *_members(_integer("usize", _U64_LIMIT), "conditional_disagg_eff_isl_threshold"),
        *_members(real, "conditional_disagg_eff_isl_ratio_threshold"),
        *_members(_optional(real), "conditional_disagg_prefill_busy_threshold"),
        *_members(_optional(real), "conditional_disagg_decode_busy_threshold"),
    )


_Read = Callable[[Any], Any]


def _members(read: _Read, *names: str) -> list[Member]:
    return [Member(name, read, default=None, list_default=None) for name in names]


def _optional(read: _Read) -> _Read:
    return lambda cursor: cursor.read_optional(read)


def _integer(expected: str, limit: int) -> _Read:
    return lambda cursor: cursor.read_integer(expected, limit)


def _string(expected: str) -> _Read:
    return lambda cursor: cursor.read_string(expected)


def _word(*known: str) -> _Read:
    return lambda cursor: cursor.read_word(known)
