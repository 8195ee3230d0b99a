"""What a worker tells about its engine when it registers a model (Dynamo's ``ModelRuntimeConfig``; spec/services d.2).

Setters check types only, as Dynamo's do; what values mean together is checked by ``check_runtime_config`` when a model
is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_es.models.endpoint_id import EndpointId, parse_endpoint_id
from dynamo_es.models.errors import ModelError
from dynamo_es.router.config_arguments import optional, to_boolean, to_real, to_text, to_u16, to_u32, to_u64
from dynamo_es.router.json_scanner import JsonRefusal
from dynamo_es.router.strict_json import JsonCursor, read_document
from dynamo_es.value_kinds import scalar_kind

ENFORCEMENTS = ("required", "preferred")
TOKENIZER_BACKENDS = ("default", "fastokens", "basetenkenizer")
STRUCTURAL_TAGS = {"mode": ("off", "on"), "scope": ("auto", "always"), "schema": ("auto", "strict")}
_CLASS = "builtins.ModelRuntimeConfig"


def _to_enforcement(argument: str, value: Any) -> str:
    text = to_text(argument, value)
    if text not in ENFORCEMENTS:
        raise ValueError(f"kv_transfer_enforcement must be 'required' or 'preferred', got \"{text}\"")
    return text


def to_tokenizer_backend(argument: str, value: Any) -> str:
    """The name of a tokenizer. Raises TypeError, ValueError."""
    text = to_text(argument, value)
    if text not in TOKENIZER_BACKENDS:
        raise ValueError(f"invalid tokenizer backend '{text}' (expected 'default', 'fastokens', or 'basetenkenizer')")
    return text


def _to_endpoint(argument: str, value: Any) -> EndpointId:
    return parse_endpoint_id(to_text(argument, value))


def _to_taints(argument: str, value: Any) -> frozenset[str]:
    return read_taints(value, argument)


def _to_domains(argument: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'PyDict'")
    for item in (*value, *value.values()):
        if not isinstance(item, str):
            raise TypeError(f"'{type(item).__name__}' object cannot be converted to 'PyString'")
    return dict(value)


def _to_enabled(_argument: str, value: Any) -> bool:
    return to_boolean("enabled", value)


# In the order of Dynamo's card. ``total_kv_blocks`` and its two sisters begin as None and cannot be set back to it.
_FIELDS: dict[str, tuple[Callable[[str, Any], Any], Any]] = {
    "context_length": (optional(to_u32), None),
    "total_kv_blocks": (to_u64, None),
    "max_num_seqs": (to_u64, None),
    "max_num_batched_tokens": (to_u64, None),
    "tool_call_parser": (optional(to_text), None),
    "reasoning_parser": (optional(to_text), None),
    "tokenizer_backend": (optional(to_tokenizer_backend), None),
    "exclude_tools_when_tool_choice_none": (to_boolean, True),
    "data_parallel_start_rank": (to_u32, 0),
    "data_parallel_size": (to_u32, 1),
    "enable_local_indexer": (to_boolean, True),
    "kv_event_publishing_enabled": (optional(_to_enabled), None),
    "kv_event_source_mode": (optional(to_text), None),
    "kv_state_endpoint": (optional(_to_endpoint), None),
    "enable_eagle": (to_boolean, False),
    "taints": (_to_taints, frozenset()),
    "stable_routing_id": (optional(to_text), None),
    "topology_domains": (_to_domains, {}),
    "kv_transfer_domain": (optional(to_text), None),
    "kv_transfer_enforcement": (optional(_to_enforcement), None),
    "kv_transfer_preferred_weight": (optional(to_real), None),
}
_READ_ONLY = ("runtime_data", "bootstrap_host", "bootstrap_port")


def read_taints(value: Any, argument: str = "taints") -> frozenset[str]:
    """A set of texts. Raises TypeError."""
    if not isinstance(value, set):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'PySet'")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"argument '{argument}': '{type(item).__name__}' object cannot be converted to 'PyString'")
    return frozenset(value)


class ModelRuntimeConfig:
    """What a worker tells about its engine. Attributes are set one by one; reading gives copies.

    Attributes:
        context_length: Tokens of a request, prompt and answer; None: what the model's files say.
        total_kv_blocks, max_num_seqs, max_num_batched_tokens: Size of a rank's cache, requests and tokens of a pass.
        tool_call_parser, reasoning_parser: Names of parsers; not checked here.
        tokenizer_backend: ``default``, ``fastokens`` or ``basetenkenizer``.
        exclude_tools_when_tool_choice_none: Keep tools out of the template when the request wants none called.
        data_parallel_start_rank, data_parallel_size: Ranks of this worker.
        enable_local_indexer, kv_event_publishing_enabled, kv_event_source_mode, kv_state_endpoint: Of Dynamo's event
            plane; told, and without meaning for a router that reads the log.
        enable_eagle: Blocks are hashed with one token more, for speculative decoding.
        taints: Labels that requests may ask for or avoid; with the prefix ``dynamo.topology/`` they are dropped.
        stable_routing_id: Identity that survives restarts.
        topology_domains: Place by kind of place, such as ``{"zone": "a"}``; each becomes a taint.
        kv_transfer_domain, kv_transfer_enforcement, kv_transfer_preferred_weight: Whether KV blocks have to
            (``required``) or should (``preferred``, with a weight of 0 to 1) stay within a kind of place.
        runtime_data: Engine-specific values as compact JSON text; read only, see ``set_engine_specific``.
        bootstrap_host, bootstrap_port: Read only, see ``set_disaggregated_endpoint``.
    """

    __slots__ = ("_bootstrap", "_engine", "_structural", "_values")
    _values: dict[str, Any]
    _engine: dict[str, Any]
    _structural: dict[str, str]
    _bootstrap: tuple[str | None, int | None]

    def __init__(self) -> None:
        set_slot = object.__setattr__
        set_slot(self, "_values", {name: default for name, (_, default) in _FIELDS.items()})
        set_slot(self, "_engine", {})
        set_slot(self, "_structural", {part: words[0] for part, words in STRUCTURAL_TAGS.items()})
        set_slot(self, "_bootstrap", (None, None))

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS:
            return _shown(self._values[name])
        if name == "runtime_data":
            return {key: msgspec.json.encode(value).decode() for key, value in self._engine.items()}
        if name in _READ_ONLY:
            return self._bootstrap[name == "bootstrap_port"]
        raise AttributeError(f"'{_CLASS}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ_ONLY:
            raise AttributeError(f"attribute '{name}' of '{_CLASS}' objects is not writable")
        if name not in _FIELDS:
            raise AttributeError(f"'{_CLASS}' object has no attribute '{name}'")
        self._values[name] = _FIELDS[name][0](name, value)

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Keep a value of the engine's own under ``key``: text is read as JSON, anything else is taken as it is.

        Raises:
            TypeError: ``key`` is no text, or ``value`` cannot be JSON.
            ModelError: The text is no JSON; says where.
        """
        name = to_text("key", key)
        if isinstance(value, str):
            self._engine[name] = read_json(value)
            return
        try:
            self._engine[name] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"argument 'value': it cannot be written as JSON: {error}") from error

    def get_engine_specific(self, key: str) -> str | None:
        """The text kept under ``key``; None: there is nothing. ``runtime_data`` shows values of every kind.

        Raises:
            ModelError: What is kept is no text.
        """
        value = self._engine.get(key, "")
        if not isinstance(value, str):
            raise ModelError(f"invalid type: {_json_kind(value)}, expected a string")
        return value if key in self._engine else None

    def set_structural_tag_mode(self, mode: str) -> None:
        """``off`` (default) or ``on``. Raises ModelError."""
        self._set_structural("mode", mode)

    def set_structural_tag_scope(self, scope: str) -> None:
        """``auto`` (default) or ``always``. Raises ModelError."""
        self._set_structural("scope", scope)

    def set_structural_tag_schema(self, schema: str) -> None:
        """``auto`` (default) or ``strict``. Raises ModelError."""
        self._set_structural("schema", schema)

    def set_disaggregated_endpoint(self, bootstrap_host: str | None = None, bootstrap_port: int | None = None) -> None:
        """Where decode workers fetch KV blocks from this one; both are replaced. Raises TypeError, OverflowError."""
        host = optional(to_text)("bootstrap_host", bootstrap_host)
        object.__setattr__(self, "_bootstrap", (host, optional(to_u16)("bootstrap_port", bootstrap_port)))

    def card_body(self) -> dict[str, Any]:
        """Everything as the card has it: what is unset is null or missing, as in Dynamo's card; taints as they are."""
        values = self._values
        body: dict[str, Any] = {}
        for name in ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "tool_call_parser"):
            body[name] = values[name]
        body["reasoning_parser"] = values["reasoning_parser"]
        body["tool_call_arguments_format"] = "json_string"
        body.update({f"structural_tag_{part}": word for part, word in self._structural.items()})
        for name in (
            "exclude_tools_when_tool_choice_none", "data_parallel_start_rank", "data_parallel_size",
            "enable_local_indexer", "enable_eagle",
        ):  # fmt: skip
            body[name] = values[name]
        for name in _FIELDS:
            value = values[name]
            if name not in body and value is not None and value not in ({}, frozenset()):
                body[name] = _card_value(value)
        if self._engine:
            body["runtime_data"] = dict(self._engine)
        if self._bootstrap != (None, None):
            body["disaggregated_endpoint"] = dict(zip(_READ_ONLY[1:], self._bootstrap, strict=True))
        return body

    def _set_structural(self, part: str, value: Any) -> None:
        text = to_text(part, value)
        words = STRUCTURAL_TAGS[part]
        if text not in words:
            raise ModelError(f"Invalid structural_tag_{part}: {text}. Expected '{words[0]}' or '{words[1]}'.")
        self._structural[part] = text


def check_runtime_config(body: dict[str, Any]) -> None:
    """What the values of a ``card_body`` mean together.

    Raises:
        ValueError: ``<field>: <message>``, with Dynamo's texts; ``__all__`` where several do not agree.
    """
    domains = body.get("topology_domains", {})
    for key, value in domains.items():
        for what, text in (("key", key), ("value", value)):
            if why := _why_no_domain_part(text):
                raise ValueError(f"topology_domains: topology_domains {what} must {why}")
    weight, enforcement = body.get("kv_transfer_preferred_weight"), body.get("kv_transfer_enforcement")
    if weight is not None and not 0 <= weight <= 1:
        limits = f'{{"value": Number({weight}), "min": Number(0.0), "max": Number(1.0)}}'
        raise ValueError(f"kv_transfer_preferred_weight: Validation error: range [{limits}]")
    if body.get("kv_transfer_domain") is not None and body["kv_transfer_domain"] not in domains:
        raise ValueError("__all__: kv_transfer_domain must reference a key in topology_domains")
    if enforcement is not None and body.get("kv_transfer_domain") is None:
        raise ValueError("__all__: kv_transfer_enforcement requires kv_transfer_domain")
    if enforcement == "preferred" and weight is None:
        raise ValueError("__all__: kv_transfer_preferred_weight is required when kv_transfer_enforcement is preferred")
    if enforcement != "preferred" and weight is not None:
        raise ValueError(
            "__all__: kv_transfer_preferred_weight can only be set when kv_transfer_enforcement is preferred"
        )


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ModelError with serde_json's words and place."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        read_document(data, JsonCursor.skip)
        return msgspec.json.decode(data)
    except (JsonRefusal, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(str(error)) from error


def _why_no_domain_part(text: str) -> str | None:
    if not text:
        return "be non-empty"
    if "=" in text:
        return "not contain '='"
    return "not contain leading or trailing whitespace" if text != text.strip() else None


def _shown(value: Any) -> Any:
    if isinstance(value, EndpointId):
        return str(value)
    if isinstance(value, frozenset):
        return set(value)
    return dict(value) if isinstance(value, dict) else value


def _card_value(value: Any) -> Any:
    if isinstance(value, EndpointId):
        return value._asdict()
    if isinstance(value, frozenset):
        return sorted(value)
    return dict(value) if isinstance(value, dict) else value


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return scalar_kind(value) or ("map" if isinstance(value, dict) else "sequence")
