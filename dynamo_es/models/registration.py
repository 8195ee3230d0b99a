"""Telling the fleet what a process serves (Dynamo's ``register_model`` and its sisters; spec/services d.3–d.6).

A model is one row of the topic ``registry``, held by the process's lease. Arguments are checked before anything is
awaited, in Dynamo's order and words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import blake3
import msgspec

from dynamo_es.models.card_json import CUSTOM_TEMPLATE, FILE_SIZES, TEMPLATE_TEXT, router_config_body, slug
from dynamo_es.models.errors import CardNotFound, ModelError
from dynamo_es.models.fetch import Hub
from dynamo_es.models.kinds import ModelInput, ModelType, WorkerType
from dynamo_es.models.media_config import MediaDecoder, MediaFetcher
from dynamo_es.models.runtime_config import ModelRuntimeConfig, check_runtime_config, read_taints
from dynamo_es.models.tensor_config import check_tensor_config
from dynamo_es.router.config_arguments import optional, to_boolean, to_text, to_texts, to_u32
from dynamo_es.router.config_routing import RouterConfig
from dynamo_es.router.modes import RouterMode
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, make_card, read_model_facts
from schemas.registry import ModelCard, key_model

DEFAULT_BLOCK_SIZE = 16
TOPOLOGY_PREFIX = "dynamo.topology/"
# The template travels in the card, which is one record.
MAX_TEMPLATE_BYTES = 256 * 1024
_NEEDY = (WorkerType.Prefill, WorkerType.Decode)
# Models of these APIs have no tokenizer and no context, so no directory is read for them.
_WITHOUT_FILES = ModelType.Images | ModelType.Videos | ModelType.Realtime
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A checked registration: the endpoint, what is known without reading a file, and where the files are."""

    endpoint: Endpoint
    path: str
    name: str | None
    lora_name: str | None
    model_input: ModelInput
    model_type: ModelType
    worker_type: WorkerType
    needs: list[list[str]]
    block_size: int | None
    runtime_config: dict[str, Any]
    details: dict[str, Any]
    user_data: Any
    aliases: list[str]
    template: Path | None
    ignore_weights: bool
    hub: Hub

    @property
    def suffix(self) -> str:
        """Last part of the registration's key."""
        return "" if self.lora_name is None else slug(self.lora_name)

    @property
    def has_files(self) -> bool:
        """Whether there is a directory to read."""
        tensor = self.model_input is ModelInput.Tensor and self.model_type is ModelType.TensorBased
        return not tensor and not self.model_type & _WITHOUT_FILES


def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    worker_type: WorkerType | None = None,
    kv_cache_block_size: int | None = None,
    router_config: RouterConfig | None = None,
    router_mode: RouterMode | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    tensor_model_config: dict[str, Any] | None = None,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | None = None,
    media_decoder: MediaDecoder | None = None,
    media_fetcher: MediaFetcher | None = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    needs: Sequence[Sequence[WorkerType]] | None = None,
    self_host_metadata: bool | None = None,
    ignore_weights: bool = False,
    max_gpu_lora_count: int | None = None,
    model_aliases: Sequence[str] | None = None,
    hub: Hub | None = None,
) -> Awaitable[None]:
    """Register a model, or a LoRA over one, at ``endpoint``; await what it returns. Known to the fleet on return.

    Args:
        model_input, model_type: What requests hold, and the APIs that are offered.
        endpoint: Who serves it.
        model_path: A model directory, or a name on the Hugging Face hub, which is fetched. Not read for tensor models
            and for those that make pictures or videos.
        model_name: Name by which requests ask for it; None: the path.
        worker_type, needs: This worker's stage, and the stages it relies on: all of any one of the lists.
        kv_cache_block_size: Tokens a block; None: 16.
        router_config, router_mode: How requests should be routed to it; the mode alone stands for a ``RouterConfig``.
        runtime_config: What is to be known of the engine.
        tensor_model_config: Inputs and outputs of a tensor model.
        user_data: What whoever reads the card should find in it; JSON.
        custom_template_path: Chat template instead of the model's own; at most 256 KiB.
        media_decoder, media_fetcher: How media in requests are treated.
        lora_name, base_model_path: A LoRA, by which name requests ask for it, and the model that it extends.
        self_host_metadata: Accepted for Dynamo's sake: files are found by ``model_path``.
        ignore_weights: Fetch no weights from the hub.
        max_gpu_lora_count: LoRAs that the engine holds at a time.
        model_aliases: Further names.
        hub: Where models are fetched from; None: as the environment says. Not in Dynamo.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: ``worker_type`` or ``needs`` is missing, only half of a LoRA is given, its name is slashes alone, or
            ``runtime_config`` does not agree with itself.
        FileNotFoundError: There is no such template.
        ModelError: ``tensor_model_config`` or ``user_data`` is refused; when awaited, the endpoint has another model.
        ModelFetchError, ConfigError, LogError: When awaited: the model's files, or the log, cannot be used.
    """
    kind = _instance("worker_type", worker_type, WorkerType) if worker_type is not None else None
    needed = optional(_to_needs)("needs", needs) or []
    lora = optional(to_text)("lora_name", lora_name)
    base = optional(to_text)("base_model_path", base_model_path)
    template = optional(to_text)("custom_template_path", custom_template_path)
    _check_stage(kind, needed)
    if (lora is None) != (base is None):
        raise ValueError("lora_name and base_model_path must both be provided together, or neither")
    if lora is not None and not slug(lora):
        raise ValueError(f"lora_name {lora!r} has nothing that a registration beside its model can be called by")
    if template is not None and not Path(template).is_file():
        raise FileNotFoundError(f"Custom template file does not exist: {template}")
    optional(to_boolean)("self_host_metadata", self_host_metadata)
    lora_slots = optional(to_u32)("max_gpu_lora_count", max_gpu_lora_count)
    runtime_body = _runtime_body(runtime_config, lora_slots if lora is None else None)
    details = _details(router_config, router_mode, tensor_model_config, media_decoder, media_fetcher)
    if lora is not None and lora_slots is not None:
        details["lora"] = {"max_gpu_lora_count": lora_slots}
    assert kind is not None
    wanted = _Wanted(
        endpoint=endpoint,
        path=to_text("model_path", model_path) if base is None else base,
        name=optional(to_text)("model_name", model_name) if lora is None else lora,
        lora_name=lora,
        model_input=_instance("model_input", model_input, ModelInput),
        model_type=_instance("model_type", model_type, ModelType),
        worker_type=kind,
        needs=needed,
        block_size=optional(to_u32)("kv_cache_block_size", kv_cache_block_size),
        runtime_config=runtime_body,
        details=details,
        user_data=_to_user_data(user_data),
        aliases=optional(to_texts)("model_aliases", model_aliases) or [],
        template=None if template is None else Path(template),
        ignore_weights=to_boolean("ignore_weights", ignore_weights),
        hub=hub or Hub(),
    )
    return _register(wanted)


async def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> None:
    """Take a model of this process, or one LoRA of it, back.

    Raises:
        TypeError: ``lora_name`` is no text.
        CardNotFound: It is not registered.
        LogError: The log cannot be used.
    """
    lora = optional(to_text)("lora_name", lora_name)
    key, shown = _key(endpoint, "" if lora is None else slug(lora))
    await endpoint.core.start()
    if lora is not None and not slug(lora):
        raise CardNotFound(f"{shown}/{lora}")  # The key is the model's.
    if not await endpoint.core.registration.unregister(key):
        raise CardNotFound(shown)


def update_model_taints(endpoint: Endpoint, taints: set[str]) -> Awaitable[None]:
    """Replace the taints of this process's model by others; those that say its topology stay. Await what it returns.

    Raises:
        TypeError: ``taints`` is no set of texts.
        ModelError: A taint begins with ``dynamo.topology/``.
        CardNotFound: When awaited: no model is registered.
        LogError: When awaited: the log cannot be used.
    """
    given = read_taints(taints)
    for taint in sorted(given):
        if taint.startswith(TOPOLOGY_PREFIX):
            raise ModelError(f"taint '{taint}' uses reserved prefix '{TOPOLOGY_PREFIX}'")
    return _update_taints(endpoint, given)


async def _update_taints(endpoint: Endpoint, taints: frozenset[str]) -> None:
    key, shown = _key(endpoint, "")
    await endpoint.core.start()
    row = endpoint.core.registration.row(key)
    if not isinstance(row, ModelCard):
        raise CardNotFound(shown)
    config = _with_taints(row.runtime_config, taints)
    await endpoint.core.registration.register(key, msgspec.structs.replace(row, runtime_config=config))


async def _register(wanted: _Wanted) -> None:
    facts = await asyncio.to_thread(_read_facts, wanted)
    template = None if wanted.template is None else await asyncio.to_thread(read_template, wanted.template)
    await wanted.endpoint.core.start()
    card = _make_card(wanted, facts, template)
    key, _ = _key(wanted.endpoint, wanted.suffix)
    row = wanted.endpoint.core.registration.row(key)
    if isinstance(row, ModelCard) and not _same_but_taints(row, card):
        raise ModelError("model update can only change runtime_config.taints")
    await wanted.endpoint.core.registration.register(key, card)


def _make_card(wanted: _Wanted, facts: ModelFacts, template: dict[str, Any] | None) -> ModelCard:
    endpoint = wanted.endpoint
    named = wanted.name if wanted.name is not None else wanted.path
    block_size = DEFAULT_BLOCK_SIZE if wanted.has_files else 0
    card = make_card(
        facts,
        endpoint.parts,
        endpoint.core.instance_id,
        name=named,
        block_size=block_size if wanted.block_size is None else wanted.block_size,
        runtime_config=wanted.runtime_config,
        model_type=wanted.model_type.card_text(),
        worker_type=str(wanted.worker_type),
        needs=wanted.needs,
    )
    details = dict(wanted.details)
    if facts.checksums:
        details[FILE_SIZES] = dict(facts.sizes)
        details["architectural_max_context_length"] = facts.context_length
    card = msgspec.structs.replace(card, details=details)
    return msgspec.structs.replace(
        card if template is None else with_template(card, template),
        display_name=named,
        suffix=wanted.suffix,
        lora_name=wanted.lora_name,
        source_path="" if not wanted.has_files and named == wanted.path else card.source_path,
        model_input=wanted.model_input.name,
        aliases=wanted.aliases,
        user_data=wanted.user_data,
    )


def with_template(card: ModelCard, template: Mapping[str, Any]) -> ModelCard:
    """``card`` with a chat template of ``read_template`` that counts instead of the model's own."""
    return msgspec.structs.replace(
        card,
        details={**card.details, CUSTOM_TEMPLATE: dict(template)},
        # Workers of one model must agree on it, as on the template of its own.
        checksums={**card.checksums, "chat_template.jinja": template["checksum"]},
    )


def _read_facts(wanted: _Wanted) -> ModelFacts:
    """What the model's files say; fetched from the hub if the path is no directory."""
    if not wanted.has_files:
        return ModelFacts(wanted.path, wanted.path, 0)
    path = wanted.path
    if path != BUILTIN_MODEL and not Path(path).is_dir():
        path = str(wanted.hub.download(path, ignore_weights=wanted.ignore_weights))
    return read_model_facts(path)


def read_template(path: Path) -> dict[str, Any]:
    """A chat template as a card holds it. Blocks. Raises OSError; ``ModelError``: too large, or no text."""
    size = path.stat().st_size
    if size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"chat template {path} is {size} bytes long, at most {MAX_TEMPLATE_BYTES} are taken")
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"chat template {path} is no UTF-8 text: {error}") from error
    checksum = f"blake3:{blake3.blake3(data).hexdigest()}"
    return {"path": str(path), "checksum": checksum, "size": len(data), TEMPLATE_TEXT: text}


def _same_but_taints(row: ModelCard, card: ModelCard) -> bool:
    def bare(value: ModelCard) -> ModelCard:
        config = {name: item for name, item in value.runtime_config.items() if name != "taints"}
        return msgspec.structs.replace(value, lease_id=0, runtime_config=config)

    return bare(row) == bare(card)


def _check_stage(kind: WorkerType | None, needs: list[list[str]]) -> None:
    if kind is None:
        raise ValueError(
            "register_model: `worker_type` is required. Pass one of WorkerType.Prefill / Decode / Encode / Aggregated."
        )
    if kind in _NEEDY and not needs:
        raise ValueError(
            f"register_model: worker_type={kind.name} requires a non-empty `needs` "
            "(at least one peer worker type the role depends on)"
        )


def _runtime_body(config: Any, lora_slots: int | None) -> dict[str, Any]:
    given = ModelRuntimeConfig() if config is None else _instance("runtime_config", config, ModelRuntimeConfig)
    body = given.card_body()
    check_runtime_config(body)
    if lora_slots is not None:
        body["max_gpu_lora_count"] = lora_slots
    return _with_taints(body, frozenset(body.get("taints", ())))


def _with_taints(body: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """The body with these taints and those of its topology; whoever else says where it is, is not believed."""
    derived = {f"{TOPOLOGY_PREFIX}{domain}={value}" for domain, value in body.get("topology_domains", {}).items()}
    taints = derived | {taint for taint in given if not taint.startswith(TOPOLOGY_PREFIX)}
    changed = {name: value for name, value in body.items() if name != "taints"}
    return {**changed, "taints": sorted(taints)} if taints else changed


def _details(
    router_config: Any, router_mode: Any, tensor_config: Any, media_decoder: Any, media_fetcher: Any
) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if router_mode is not None:
        if router_config is not None:
            raise ValueError("router_config and router_mode say the same thing twice: give one of them")
        router_config = RouterConfig(_instance("router_mode", router_mode, RouterMode))
    if router_config is not None:
        details["router_config"] = router_config_body(_instance("router_config", router_config, RouterConfig))
    if tensor_config is not None:
        details["tensor_model_config"] = check_tensor_config(tensor_config)
    if media_decoder is not None:
        details["media_decoder"] = _instance("media_decoder", media_decoder, MediaDecoder).card_body()
    if media_fetcher is not None:
        details["media_fetcher"] = _instance("media_fetcher", media_fetcher, MediaFetcher).card_body()
    return details


def _to_needs(argument: str, value: Any) -> list[list[str]]:
    found = []
    for item in (value, *(value if isinstance(value, list | tuple) else ())):
        if not isinstance(item, list | tuple):
            raise TypeError(f"argument '{argument}': '{type(item).__name__}' object cannot be converted to 'Sequence'")
    for alternative in value:
        found.append([str(_instance(argument, kind, WorkerType)) for kind in alternative])
    return found


def _to_user_data(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"argument 'user_data': '{type(value).__name__}' object cannot be converted to 'PyDict'")
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"Failed to convert user_data: {error}") from error


def _instance(argument: str, value: Any, kind: type[K]) -> K:
    if not isinstance(value, kind):
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object cannot be converted to '{kind.__name__}'"
        )
    return value


def _key(endpoint: Endpoint, suffix: str) -> tuple[bytes, str]:
    """Record key of a registration of this process, and how it is shown."""
    where = endpoint.parts
    instance_id = endpoint.core.instance_id
    shown = "/".join((*where, f"{instance_id:x}", *([suffix] if suffix else ())))
    return key_model(*where, instance_id, suffix), shown
