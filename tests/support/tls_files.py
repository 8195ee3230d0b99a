"""Certificates of the tests' own authorities, as files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography.hazmat.primitives import serialization


class Pair(NamedTuple):
    cert: Path
    key: Path


def authority_file(folder: Path, *authorities: trustme.CA, name: str = "ca.pem") -> Path:
    path = folder / name
    path.write_bytes(b"".join(authority.cert_pem.bytes() for authority in authorities))
    return path


def issue(folder: Path, authority: trustme.CA, name: str = "server", *, password: str | None = None) -> Pair:
    """A certificate for 127.0.0.1 and localhost in ``<name>.crt`` and ``<name>.key``; both replaced if there."""
    leaf = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    key = leaf.private_key_pem.bytes()
    if password is not None:
        private = serialization.load_pem_private_key(key, None)
        key = private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
    for path, content in ((pair.key, key), (pair.cert, b"".join(item.bytes() for item in leaf.cert_chain_pems))):
        fresh = path.with_suffix(path.suffix + ".new")
        fresh.write_bytes(content)
        fresh.replace(path)
    return pair
