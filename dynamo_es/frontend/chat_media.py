"""Media of a chat: what of them the template sees, what workers get, and from where they may come. Pure.

A worker gets URLs, or decoded pictures if its card has a decoder (``media_decoding``), by kind and in the order of the
messages: ``multi_modal_data``, ``{"image_url": [{"Url": ...}, ...]}``. Whoever is to fetch them, the URLs follow the
rules of the card's ``MediaFetcher``, or the rules of a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import AudioPart, AudioUrlPart, ImagePart, Message, ToolMessage, UserMessage, VideoPart
from dynamo_es.frontend.utils import media_slot
from dynamo_es.models.media_config import fetcher_of_card
from dynamo_es.models.media_rules import FetchRules, MediaRefused
from dynamo_es.router.hashing import mm_identifier_hash, mm_pad_value
from schemas.registry import ModelCard

MAX_MEDIA = 128
"""Of one request."""
_KINDS: Mapping[type, str] = {ImagePart: "image", VideoPart: "video", AudioUrlPart: "audio", AudioPart: "audio"}
_URL = "Url"


class Medium(NamedTuple):
    """One part of a request that is no text.

    Attributes:
        name: How errors call it: its kind and its number among those of that kind, from 1.
        kind: ``image_url``, ``video_url`` or ``audio_url``.
        slot: ``{"Url": ...}``, or ``{"UuidOnly": ...}`` for a picture that the engine has.
        uuid: By which the engine keeps it, or None.
    """

    name: str
    kind: str
    slot: dict[str, str]
    uuid: str | None

    @property
    def url(self) -> str | None:
        """Where it is; None: the engine has it."""
        return self.slot.get(_URL)


class MediaCounts(NamedTuple):
    """Parts of a request with a URL, by kind."""

    images: int = 0
    videos: int = 0
    audio: int = 0


NO_MEDIA = MediaCounts()
_COUNTED = (ImagePart, VideoPart, AudioUrlPart)


def count_media(messages: Sequence[Message]) -> MediaCounts:
    """How many there are in all messages; what they are is not looked at."""
    kinds = [
        type(part)
        for message in messages
        if isinstance(message, UserMessage | ToolMessage) and not isinstance(message.content, str)
        for part in message.content
    ]
    return MediaCounts(*(kinds.count(kind) for kind in _COUNTED)) if kinds else NO_MEDIA


def placeholder(part: Any) -> dict[str, Any] | None:
    """What a template sees in a medium's place; None: the part is none."""
    kind = _KINDS.get(type(part))
    return None if kind is None else {"type": kind}


def media_of(messages: Sequence[Message]) -> list[Medium]:
    """The media of all messages, in order.

    Raises:
        ApiError: 400; a part lacks what it needs, is sound within the request, or there are too many.
    """
    found: list[Medium] = []
    counts: dict[str, int] = {}
    for message in messages:
        if not isinstance(message, UserMessage | ToolMessage) or isinstance(message.content, str):
            continue
        for part in message.content:
            word = _KINDS.get(type(part))
            if word is not None:
                counts[word] = counts.get(word, 0) + 1
                found.append(_medium(part, f"{word} {counts[word]}"))
    if len(found) > MAX_MEDIA:
        raise ApiError(
            400, f"Validation: a request has at most {MAX_MEDIA} images, videos and recordings, got {len(found)}",
            param="messages", code="too_many_media",
        )  # fmt: skip
    return found


def _medium(part: Any, name: str) -> Medium:
    if isinstance(part, AudioPart):
        raise refused(name, "`input_audio` does not reach this model's workers; send an `audio_url`")
    kind = part.__struct_config__.tag
    try:
        slot, uuid = media_slot(kind, {kind: getattr(part, kind), "uuid": part.uuid})
    except ValueError as error:
        raise refused(name, str(error)) from error
    return Medium(name, kind, slot, uuid)


def refused(name: str, why: str, code: str = "invalid_value") -> ApiError:
    """400 for the medium of this name."""
    return ApiError(400, f"Validation: {name}: {why}", param="messages", code=code)


def check_urls(media: Sequence[Medium], rules: FetchRules) -> None:
    """Refuse URLs that lead where none may go. What is in the request itself, by ``data:``, is looked at elsewhere.

    Raises:
        ApiError: 400, ``media_refused``.
    """
    for medium in media:
        url = medium.url
        if url is None or url[:5].lower() == "data:":
            continue
        try:
            rules.check_url(url)
        except MediaRefused as error:
            raise refused(medium.name, str(error), "media_refused") from error


def fetch_rules(card: ModelCard) -> FetchRules:
    """From where media of this model may come. Raises ModelError."""
    return FetchRules.of_card(fetcher_of_card(card.details.get("media_fetcher")).card_body())


class PromptMedia(NamedTuple):
    """Media of one prompt.

    Attributes:
        media: In order; at least one.
        text_tokens: How many tokens of the prompt come before the first of them.
    """

    media: Sequence[Medium]
    text_tokens: int

    def add_to(self, request: dict[str, Any]) -> None:
        """Put them into a worker request, and into what it is routed by.

        Where a prompt has placeholders, different pictures would look the same to a router: what begins with the first
        of them is hashed together with what the media are.
        """
        data: dict[str, list[Any]] = {}
        uuids: dict[str, list[str | None]] = {}
        for medium in self.media:
            data.setdefault(medium.kind, []).append(medium.slot)
            uuids.setdefault(medium.kind, []).append(medium.uuid)
        request["multi_modal_data"] = data
        if any(uuid is not None for slots in uuids.values() for uuid in slots):
            request["multi_modal_uuids"] = uuids
        self.route_by(request, [_identity(medium) for medium in self.media])

    def route_by(self, request: dict[str, Any], identities: Sequence[int]) -> None:
        """Route the request by these hashes of its media (u64), one each."""
        token_ids, place = request["token_ids"], self.text_tokens
        marks = [mm_pad_value(identity) for identity in identities]
        request["mm_routing_info"] = {
            "routing_token_ids": [*token_ids[:place], *marks, *token_ids[place:]],
            "block_mm_infos": None,
        }


def _identity(medium: Medium) -> int:
    return mm_identifier_hash(medium.uuid or medium.url or "") or 0


def common_tokens(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    place = 0
    for ours, theirs in zip(token_ids, others, strict=False):
        if ours != theirs:
            break
        place += 1
    return place
