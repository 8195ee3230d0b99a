"""Requests to change the protocol of a connection (``Upgrade``), none of which is granted: HTTP/1.1 is all there is.

A server may ignore such a request (RFC 9110, 7.8), and clients count on that: Java's offers ``h2c`` on a plain port by
itself. httptools ends the message behind the head of one, whose body would be lost, so it must not see it. Pure.
"""

from __future__ import annotations

import re

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_HIDDEN = b"\r\nignored:"
_HEAD_END = b"\r\n\r\n"


def without_upgrade(data: bytes) -> bytes:
    """``data``, which begins in the head of a request, with its ``Upgrade`` header under another name, as long."""
    head, end, rest = data.partition(_HEAD_END)
    if _UPGRADE.search(head) is None:
        return data
    return _UPGRADE.sub(_HIDDEN, head) + end + rest
