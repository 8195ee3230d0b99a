"""What a model's media may be: settings of decoding and fetching, as a card tells them (Dynamo's ``MediaDecoder`` and
``MediaFetcher``; spec/services d.10). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.models.errors import ModelError
from dynamo_es.router.config_arguments import optional, to_boolean, to_text, to_texts, to_u64
from dynamo_es.router.hashing_arguments import extract_u32, extract_u64

DEFAULT_IMAGE_BYTES = 128 * 1024 * 1024
DEFAULT_TIMEOUT_MS = 30_000
DEFAULT_USER_AGENT = "dynamo-ai/dynamo"
_LIMITS = {"max_image_width": extract_u32, "max_image_height": extract_u32, "max_alloc": extract_u64}
_PREFIX = "Failed to parse image decoder config: "


class MediaDecoder:
    """Which media are decoded before a worker gets them, and within which limits; none at first."""

    __slots__ = ("_image",)

    def __init__(self) -> None:
        self._image: dict[str, int | None] | None = None

    def enable_image(self, decoder_options: Mapping[str, Any]) -> None:
        """Decode images. ``{"limits": {"max_image_width", "max_image_height": pixels, "max_alloc": bytes}}``, each None
        for no limit; without ``max_alloc`` it is 128 MiB.

        Raises:
            TypeError: No dict.
            ModelError: An unknown key, or a limit that is no count.
        """
        if not isinstance(decoder_options, dict):
            name = type(decoder_options).__name__
            raise TypeError(f"argument 'decoder_options': '{name}' object cannot be converted to 'PyDict'")
        _check_keys(decoder_options, ("limits",))
        limits: dict[str, int | None] = {
            "max_image_width": None, "max_image_height": None, "max_alloc": DEFAULT_IMAGE_BYTES,
        }  # fmt: skip
        if "limits" in decoder_options:
            limits.update(_read_limits(decoder_options["limits"]))
        self._image = limits

    def card_body(self) -> dict[str, Any]:
        """``media_decoder`` of a card."""
        return {} if self._image is None else {"image": {"limits": dict(self._image)}}


class MediaFetcher:
    """From where media are fetched, and how. Domain names with public addresses only, unless told otherwise."""

    __slots__ = ("_direct_ip", "_direct_port", "_domains", "_private_ips", "_timeout_ms", "_user_agent")

    def __init__(self) -> None:
        self._user_agent = DEFAULT_USER_AGENT
        self._direct_ip = False
        self._direct_port = False
        self._private_ips = False
        self._domains: list[str] | None = None
        self._timeout_ms = DEFAULT_TIMEOUT_MS

    def user_agent(self, user_agent: str) -> None:
        """Header ``User-Agent`` of requests. Raises TypeError."""
        self._user_agent = to_text("user_agent", user_agent)

    def allow_direct_ip(self, allow: bool) -> None:
        """Take URLs whose host is an address. Raises TypeError."""
        self._direct_ip = to_boolean("allow", allow)

    def allow_direct_port(self, allow: bool) -> None:
        """Take URLs with a port. Raises TypeError."""
        self._direct_port = to_boolean("allow", allow)

    def allow_private_ips(self, allow: bool) -> None:
        """Take hosts whose address is not public. Raises TypeError."""
        self._private_ips = to_boolean("allow", allow)

    def allowed_media_domains(self, domains: Sequence[str]) -> None:
        """Take these hosts and no others; None (default): any. Raises TypeError."""
        self._domains = optional(to_texts)("domains", domains)

    def timeout_ms(self, timeout_ms: int) -> None:
        """Longest time for one medium. Raises TypeError, OverflowError."""
        self._timeout_ms = to_u64("timeout_ms", timeout_ms)

    def card_body(self) -> dict[str, Any]:
        """``media_fetcher`` of a card."""
        seconds, rest_ms = divmod(self._timeout_ms, 1000)
        return {
            "user_agent": self._user_agent,
            "allow_direct_ip": self._direct_ip,
            "allow_direct_port": self._direct_port,
            "allow_private_ips": self._private_ips,
            "allowed_media_domains": None if self._domains is None else sorted(set(self._domains)),
            "timeout": {"secs": seconds, "nanos": rest_ms * 1_000_000},
        }


def decoder_of_card(body: Mapping[str, Any]) -> MediaDecoder:
    """From ``media_decoder`` of a card. Raises ModelError."""
    decoder = MediaDecoder()
    if body.get("image") is not None:
        try:
            decoder.enable_image(body["image"])
        except TypeError as error:
            raise ModelError(f"media_decoder of the card: {error}") from error
    return decoder


def image_limits(decoder: MediaDecoder) -> dict[str, int | None] | None:
    """Limits of pictures by their names on the card; None: pictures are not decoded."""
    limits: dict[str, int | None] | None = decoder.card_body().get("image", {}).get("limits")
    return limits


def fetcher_of_card(body: Mapping[str, Any] | None) -> MediaFetcher:
    """From ``media_fetcher`` of a card; what it does not say stays as in a plain one. Raises ModelError."""
    fetcher, given = MediaFetcher(), body or {}
    setters = (fetcher.user_agent, fetcher.allow_direct_ip, fetcher.allow_direct_port, fetcher.allow_private_ips,
               fetcher.allowed_media_domains)  # fmt: skip
    try:
        for setter in setters:
            if given.get(setter.__name__) is not None:
                setter(given[setter.__name__])
        timeout = given.get("timeout")
        if timeout is not None:
            fetcher.timeout_ms(timeout["secs"] * 1000 + timeout.get("nanos", 0) // 1_000_000)
    except (TypeError, OverflowError, KeyError, AttributeError) as error:
        raise ModelError(f"media_fetcher of the card: {type(error).__name__}: {error}") from error
    return fetcher


def _read_limits(value: Any) -> dict[str, int | None]:
    if not isinstance(value, dict):
        name = type(value).__name__
        raise ModelError(f"{_PREFIX}unexpected type: '{name}' object cannot be converted to 'Mapping'")
    _check_keys(value, tuple(_LIMITS))
    try:
        return {name: None if limit is None else _LIMITS[name](limit) for name, limit in value.items()}
    except (TypeError, OverflowError) as error:
        raise ModelError(f"{_PREFIX}{type(error).__name__}: {error}") from error


def _check_keys(value: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ModelError(f"{_PREFIX}dict keys must have type str")
        if key not in known:
            listed = ", ".join(f"`{name}`" for name in known)
            raise ModelError(f"{_PREFIX}unknown field `{key}`, expected {'one of ' if len(known) > 1 else ''}{listed}")
