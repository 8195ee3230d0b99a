"""Telling what a file is by its first bytes, and reading ``data:`` URLs. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Literal
from urllib.parse import unquote_to_bytes

from dynamo_es.models.media_rules import MediaRefused

MediaKind = Literal["image", "video"]
_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
)
_RIFF = {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}
# Brands of the ISO file format that are pictures.
_PICTURE_BRANDS = {b"avif", b"avis", b"heic", b"heix", b"mif1"}


def sniff(data: bytes) -> str | None:
    """MIME type of an image or video; None: something else. What a server claims it to be does not count."""
    for start, mime in _STARTS:
        if data.startswith(start):
            return mime
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    is_film = data[4:8] == b"ftyp" and data[8:12] not in _PICTURE_BRANDS
    return "video/mp4" if is_film else None


def check_kind(data: bytes, kind: MediaKind) -> str:
    """MIME type of ``data``. Raises MediaRefused if it is not of this kind."""
    mime = sniff(data)
    if mime is None or not mime.startswith(f"{kind}/"):
        wanted = "PNG, JPEG, GIF, WebP or BMP" if kind == "image" else "MP4, WebM or AVI"
        raise MediaRefused(f"this is no {kind}: {wanted} is taken")
    return mime


def read_data_url(url: str, max_bytes: int) -> bytes:
    """The content of ``data:[<type>][;base64],<content>``.

    Raises:
        MediaRefused: Malformed, or longer than ``max_bytes``.
    """
    head, comma, content = url.partition(",")
    if not comma:
        raise MediaRefused("data: URL without a comma")
    is_base64 = head.lower().endswith(";base64")
    # Before anything is decoded: base64 makes four characters of three bytes, percent-coding three of one.
    if len(content) > (max_bytes * 4 // 3 + 4 if is_base64 else max_bytes * 3):
        raise too_large(max_bytes)
    try:
        data = base64.b64decode(unquote_to_bytes(content), validate=True) if is_base64 else unquote_to_bytes(content)
    except (binascii.Error, ValueError) as error:
        raise MediaRefused(f"data: URL is no base64: {error}") from error
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


def too_large(max_bytes: int) -> MediaRefused:
    """The refusal of a medium above its limit."""
    return MediaRefused(f"medium of more than {max_bytes} bytes")
