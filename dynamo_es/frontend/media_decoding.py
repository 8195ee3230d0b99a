"""Decoding the pictures of a chat before its worker gets it, for models whose card has a decoder.

In the place of each URL the worker gets ``{"Decoded": {"shape": [height, width, 3], "dtype": "UINT8", "data": ...}}``:
Dynamo's members but for the data, which Dynamo leaves for the worker to fetch by RDMA and which travel with the request
here. A decoder knows pictures only, as Dynamo's does: other media of such a model are refused.
"""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_es.frontend.chat_media import Medium, PromptMedia, refused
from dynamo_es.frontend.generation import run_all
from dynamo_es.models.image_decode import DecodedImage
from dynamo_es.models.media_config import decoder_of_card, fetcher_of_card, image_limits
from dynamo_es.models.media_loader import MediaLoader, MediaUnavailable
from dynamo_es.models.media_rules import MediaRefused
from schemas.registry import ModelCard

MAX_DECODED_BYTES = 48 * 1024 * 1024
"""Of all pictures of a request, 4096 x 4096 pixels: they travel in one message, of 64 MiB at most by default."""


def decodes(card: ModelCard) -> bool:
    """Whether media of this model are decoded before a worker gets them."""
    return card.details.get("media_decoder") is not None


async def decode_media(request: dict[str, Any], prompt: PromptMedia, card: ModelCard, slots: asyncio.Semaphore) -> None:
    """Decode the media of a worker request; its routing follows, so that one picture by two URLs is the same.

    Args:
        request: Of the worker; changed.
        prompt: Its media.
        card: Of its model; has a decoder.
        slots: Bounds the pictures at a time of all requests.

    Raises:
        ApiError: 400; names the medium that is refused, cannot be had, or is none that is decoded.
        ModelError: The card is malformed.
        ConfigError: Pillow is not installed.
    """
    decoder = decoder_of_card(card.details["media_decoder"])
    limits = image_limits(decoder)
    if limits is not None:
        most = limits["max_alloc"]
        limits["max_alloc"] = MAX_DECODED_BYTES if most is None else min(most, MAX_DECODED_BYTES)
        decoder.enable_image({"limits": limits})
    for medium in prompt.media:
        if limits is None or medium.kind != "image_url":
            raise refused(medium.name, "this model takes images only, by URL", "unsupported_content")
        if medium.url is None:
            raise refused(medium.name, "images of this model are decoded here, where none is kept; send its URL")
    found: list[DecodedImage | None] = [None] * len(prompt.media)

    async with MediaLoader(fetcher_of_card(card.details.get("media_fetcher")), decoder) as loader:

        async def load(place: int, medium: Medium) -> None:
            async with slots:
                found[place] = await _load(loader, medium)
            if sum(len(image.pixels) for image in found if image is not None) > MAX_DECODED_BYTES:
                raise refused(medium.name, f"decoded images of a request have at most {MAX_DECODED_BYTES} bytes in all")

        await run_all([load(place, medium) for place, medium in enumerate(prompt.media)])
    images = [image for image in found if image is not None]
    request["multi_modal_data"] = {
        "image_url": [
            {"Decoded": {"shape": [image.height, image.width, 3], "dtype": "UINT8", "data": image.pixels}}
            for image in images
        ]
    }
    prompt.route_by(request, [image.content_hash for image in images])


async def _load(loader: MediaLoader, medium: Medium) -> DecodedImage:
    assert medium.url is not None
    try:
        image = (await loader.load(medium.url, "image")).image
    except MediaRefused as error:
        raise refused(medium.name, str(error), "media_refused") from error
    except MediaUnavailable as error:
        raise refused(medium.name, str(error), "media_unavailable") from error
    assert image is not None, "its loader decodes"
    return image
