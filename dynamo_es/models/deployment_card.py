"""Model cards as Dynamo hands them to callbacks (its ``ModelDeploymentCard``; spec/services d.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import blake3
import msgspec

from dynamo_es.models.card_json import write_card
from dynamo_es.models.errors import ModelError
from dynamo_es.models.kinds import ModelType, parse_model_type
from dynamo_es.models.runtime_config import read_json
from schemas.registry import ModelCard

_REQUIRED = ("display_name", "slug", "kv_cache_block_size", "migration_limit", "model_type", "model_input")


class ModelDeploymentCard:
    """What is known of a model that a worker serves. Made by ``from_json_str`` or ``of``; immutable."""

    __slots__ = ("_body", "_text")
    _body: dict[str, Any]
    _text: str

    def __new__(cls) -> Self:
        raise TypeError("No constructor defined for ModelDeploymentCard")

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        """The card of a registration. Not in Dynamo."""
        return cls.from_json_str(write_card(card))

    @classmethod
    def from_json_str(cls, json: str) -> Self:
        """Read a card; members that are not known here are kept.

        Raises:
            ModelError: No JSON, a member is missing that every card has, or ``model_type`` names none.
        """
        body = read_json(json)
        if not isinstance(body, dict):
            raise ModelError("a model card is a JSON object")
        for name in _REQUIRED:
            if name not in body:
                raise ModelError(f"missing field `{name}` {_end_of(json)}")
        try:
            parse_model_type(body["model_type"])
        except (ValueError, AttributeError) as error:
            raise ModelError(f"model_type: {error}") from error
        self = object.__new__(cls)
        self._body = body
        self._text = msgspec.json.encode(body).decode()
        return self

    def to_json_str(self) -> str:
        """The card as compact JSON; reading that gives an equal card."""
        return self._text

    def model_type(self) -> ModelType:
        """The APIs that it offers."""
        return parse_model_type(self._body["model_type"])

    def name(self) -> str:
        """Name by which requests ask for it."""
        return str(self._body["display_name"])

    def source_path(self) -> str:
        """Directory or hub id, as its worker saw it; the name where it has none."""
        return str(self._body.get("source_path") or self.name())

    def runtime_config(self) -> dict[str, Any]:
        """A copy of what the worker told about its engine."""
        config: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self._body.get("runtime_config") or {}))
        return config

    def local_dir(self) -> str:
        """Directory for the model's files on this machine; it need not exist."""
        digest = blake3.blake3(self._text.encode()).hexdigest()
        return str(Path.home() / ".cache/dynamo/mdc/by-slug" / Path(str(self._body["slug"])).name / digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelDeploymentCard) and self._body == other._body

    def __hash__(self) -> int:
        return hash(self._text)


class ModelCardInstanceId:
    """The endpoint and instance that a card belongs to. Dynamo makes it, scripts get it: there is no constructor."""

    __slots__ = ("_instance_id", "_triple")
    _triple: tuple[str, str, str]
    _instance_id: int

    def __new__(cls) -> Self:
        raise TypeError("No constructor defined for ModelCardInstanceId")

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        """Of a registration. Not in Dynamo."""
        self = object.__new__(cls)
        self._triple = card.namespace, card.component, card.endpoint
        self._instance_id = card.instance_id
        return self

    def triple(self) -> tuple[str, str, str]:
        """Namespace, component and endpoint."""
        return self._triple

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelCardInstanceId) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[tuple[str, str, str], int]:
        return self._triple, self._instance_id


def _end_of(text: str) -> str:
    lines = text.rstrip().split("\n")
    return f"at line {len(lines)} column {len(lines[-1].encode())}"
