"""Which URIs of LoRA adapters a request may name: an allow-list of their beginnings.

A request's path is not looked at on disk unless its text lies under an allowed folder. Symbolic links do not lead out
of the allowed folders: neither on the way to an adapter nor among its files. Who asks for adapters cannot get around
that; who may write below an allowed folder can: by a link that is made after the last look, just before the engine
reads, or by a hard link. Only those who may read all that the worker may should be allowed to write there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from dynamo_es.errors import InvalidArgument

_FILE = "file://"
_REMOTE = ("s3://", "hf://")
_MAX_CHARS = 2_048
# What means something else in a URI, or nothing at all.
_STRANGE = re.compile(r"[\s\x00-\x1f\x7f\\?#%]")
_SHOWN = 200
_MAX_FILES = 1_000


class SourceRefused(InvalidArgument):
    """A URI is none that may be loaded from. Nothing was read or fetched."""


def check_source(text: str) -> None:
    """Raises ValueError: no beginning of a URI that an allow-list can have."""
    where = text.partition("://")[2]
    named = bool(where.strip("/"))
    good = named and (where.startswith("/") if text.startswith(_FILE) else text.startswith(_REMOTE))
    if not good or _STRANGE.search(text) or _climbs(where):
        raise ValueError("expected file:///FOLDER, s3://BUCKET[/PREFIX] or hf://NAME[/NAME]")


class LoraSources:
    """The allow-list of a worker."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """``allowed``: as ``check_source`` takes them."""
        self._allowed = [text.rstrip("/") for text in allowed]

    def resolve(self, uri: str) -> str:
        """``uri`` as it may be read: a ``file://`` one without symbolic links. Blocks: it looks at the disk.

        Call it with its answer again just before that is read: it is the same, unless something was changed meanwhile.

        Raises:
            SourceRefused: It is not allowed, or one of its files leads to where nothing may be read. Whether there is
                anything is not checked.
        """
        if len(uri) > _MAX_CHARS or _STRANGE.search(uri):
            raise SourceRefused("source.uri has a character that is not taken, or is too long")
        if uri.startswith(_FILE):
            return self._file(uri)
        where = uri.partition("://")[2]
        if uri.startswith(_REMOTE) and not _climbs(where) and any(_begins(uri, known) for known in self._allowed):
            return uri
        raise _refused(uri)

    def _file(self, uri: str) -> str:
        path = uri.removeprefix(_FILE)
        if not path.startswith("/"):
            raise SourceRefused(f"source.uri {uri[:_SHOWN]!r} must have an absolute path, as file:///folder has")
        plain = os.path.normpath(path)
        roots = [os.path.normpath(known.removeprefix(_FILE)) for known in self._allowed if known.startswith(_FILE)]
        for root in roots:
            if _inside(plain, root):
                real = os.path.realpath(plain)
                if _inside(real, os.path.realpath(root)):
                    self._check_files(uri, real, [os.path.realpath(one) for one in roots])
                    return _FILE + real
        raise _refused(uri)

    def _check_files(self, uri: str, folder: str, roots: Sequence[str]) -> None:
        for entry in _entries(uri, folder):
            if os.path.islink(entry):
                real = os.path.realpath(entry)
                if not any(_inside(real, root) for root in roots):
                    inner = os.path.relpath(entry, folder)
                    raise SourceRefused(
                        f"source.uri {uri[:_SHOWN]!r} is not allowed: its {inner[:_SHOWN]!r} is a link to where no "
                        "--lora-source of this worker is"
                    )


def _entries(uri: str, folder: str) -> Iterator[str]:
    """Paths of everything below a folder. Raises ``SourceRefused``: so much is no adapter."""
    seen = 0
    for place, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > _MAX_FILES:
            raise SourceRefused(
                f"source.uri {uri[:_SHOWN]!r} has more than {_MAX_FILES} files below it; name one adapter's folder"
            )
        yield from (os.path.join(place, name) for name in (*folders, *files))


def _refused(uri: str) -> SourceRefused:
    return SourceRefused(f"source.uri {uri[:_SHOWN]!r} is not allowed: it lies under no --lora-source of this worker")


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _begins(uri: str, known: str) -> bool:
    # Behind the name of a repository there may be its revision.
    return uri == known or uri.startswith((known + "/", known + "@"))


def _climbs(where: str) -> bool:
    return any(part in (".", "..") for part in where.split("/"))
