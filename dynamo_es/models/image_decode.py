"""Decoding pictures within limits. Needs the extra ``media`` (Pillow)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from dynamo_es.errors import ConfigError
from dynamo_es.models.media_rules import MediaRefused

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_BYTES_A_PIXEL = 3


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Rows from top to bottom, pixels from left to right, three bytes each: red, green, blue.

    ``content_hash`` (u64) tells pictures apart, wherever they came from.
    """

    width: int
    height: int
    pixels: bytes
    content_hash: int


def decode_image(data: bytes, limits: Mapping[str, int | None]) -> DecodedImage:
    """Decode a picture; of several the first. Blocks for as long as it takes.

    ``limits``: ``max_image_width``, ``max_image_height`` in pixels, ``max_alloc`` in bytes of the result; None: none.
    They are checked on the size that the file states, before any pixel is decoded.

    Raises:
        MediaRefused: It is none, it is broken, or it is above a limit.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("decoding images needs Pillow: install dynamo-es[media]") from error
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            _check_size(width, height, limits)
            pixels = image.convert("RGB").tobytes()
            # Of equal pixels, but in rows of another length, another picture is made.
            return DecodedImage(width, height, pixels, xxh3_64_intdigest(pixels, width))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaRefused("image has too many pixels") from error
    except UnidentifiedImageError as error:
        raise MediaRefused("this is no image that can be decoded") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise MediaRefused(f"image is broken: {error}") from error


def _check_size(width: int, height: int, limits: Mapping[str, int | None]) -> None:
    for what, found, limit in (
        ("pixels wide", width, limits.get("max_image_width")),
        ("pixels high", height, limits.get("max_image_height")),
        ("bytes when decoded", width * height * _BYTES_A_PIXEL, limits.get("max_alloc")),
    ):
        if limit is not None and found > limit:
            raise MediaRefused(f"image is {found} {what}, at most {limit} are taken")
