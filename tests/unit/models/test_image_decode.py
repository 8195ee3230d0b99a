from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from dynamo_es.errors import ConfigError
from dynamo_es.models.image_decode import decode_image
from dynamo_es.models.media_rules import MediaRefused


def png_head(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def picture(fmt: str, mode: str = "RGB", size: tuple[int, int] = (4, 2)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, 0 if mode in "LP1" else (255, 0, 0)[: len(mode)] or 0).save(buffer, fmt)
    return buffer.getvalue()


@pytest.mark.parametrize("fmt", ["PNG", "GIF", "WEBP", "BMP", "JPEG"])
def test_pictures_become_rows_of_red_green_and_blue(fmt: str) -> None:
    image = decode_image(picture(fmt), {})
    assert (image.width, image.height, len(image.pixels)) == (4, 2, 24)
    assert image.pixels[0] > 200
    assert max(image.pixels[1:3]) < 30


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_other_modes_are_converted(mode: str) -> None:
    assert len(decode_image(picture("PNG", mode), {}).pixels) == 24


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_image_width": 3}, "image is 4 pixels wide, at most 3"),
        ({"max_image_height": 1}, "image is 2 pixels high, at most 1"),
        ({"max_alloc": 23}, "image is 24 bytes when decoded, at most 23"),
    ],
)
def test_limits(limits: dict[str, int | None], text: str) -> None:
    with pytest.raises(MediaRefused, match=text):
        decode_image(picture("PNG"), limits)
    assert decode_image(picture("PNG"), {"max_image_width": 4, "max_image_height": 2, "max_alloc": 24})
    assert decode_image(picture("PNG"), dict.fromkeys(limits))


@pytest.mark.parametrize("size", [(30_000, 30_000), (2**31 - 1, 2**31 - 1), (20_000, 5_000)])
def test_SEC_an_image_bomb_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    for limits in ({}, {"max_alloc": 128 * 1024 * 1024}):
        with pytest.raises(MediaRefused):
            decode_image(png_head(*size), limits)


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", picture("PNG")[:40], png_head(100, 100), b"<svg/>", b"%!PS"]
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused, match=r"broken|no image"):
        decode_image(data, {})


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"install dynamo-es\[media\]"):
        decode_image(b"", {})
