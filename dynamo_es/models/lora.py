"""Having LoRAs on this machine (Dynamo's ``LoRADownloader``; spec/services d.11)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from dynamo_es.models.errors import LoraError, ModelFetchError
from dynamo_es.models.fetch import DEFAULT_REVISION, Hub
from dynamo_es.models.lora_s3 import SCHEME as S3
from dynamo_es.models.lora_s3 import S3Client, download_folder, make_s3_client
from dynamo_es.router.config_arguments import optional, to_text

FOLDER_VARIABLE = "DYN_LORA_PATH"
_FILE, _HUB = "file://", "hf://"
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "model.lora_weights.npy")
_IN_KEYS = str.maketrans({"/": "_", "\\": "_", ".": "_"})
# In a folder that was fetched: the URI that it came from. Several URIs have one key.
_ORIGIN = ".dynamo-es-origin"
_MAX_URI_BYTES = 16_384


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder has an adapter's configuration and weights; their contents are not looked at. Never raises."""

    def has(name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name))

    return has(_CONFIG) and any(has(name) for name in _WEIGHTS)


class LoRADownloader:
    """A folder of LoRAs on this machine, filled from ``file://``, ``s3://`` (extra ``s3``) and ``hf://`` on demand.

    Processes may share the folder: an adapter appears in it as a whole, or not at all. What was fetched is used for its
    own URI only, although others may have the same key; what somebody else put under a key, for all of them.
    """

    def __init__(
        self,
        cache_path: str | None = None,
        *,
        hub: Hub | None = None,
        s3: Callable[[], S3Client] = make_s3_client,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``cache_path``: the folder; None: ``DYN_LORA_PATH``, or ``~/.cache/dynamo_loras``. It is made when needed.

        ``hub``, ``s3`` and ``env`` (default: the process's environment) are ours.

        Raises:
            TypeError: ``cache_path`` is no text.
        """
        given = optional(to_text)("cache_path", cache_path)
        configured = (os.environ if env is None else env).get(FOLDER_VARIABLE)
        self._root = given if given is not None else configured or str(Path.home() / ".cache/dynamo_loras")
        self._hub = hub or Hub()
        self._make_s3 = s3
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @staticmethod
    def uri_to_cache_key(uri: str) -> str:
        """Name of an adapter's folder: ``://`` becomes ``__``; ``/``, ``\\`` and ``.`` become ``_``."""
        return to_text("uri", uri).replace("://", "__").translate(_IN_KEYS)

    def get_cache_path(self, cache_key: str) -> str:
        """``cache_key`` joined to the folder, as it is: pass what ``uri_to_cache_key`` gives."""
        return os.path.join(self._root, to_text("cache_key", cache_key))

    def is_cached(self, lora_uri: str) -> bool:
        """Whether an adapter is in the folder, by URI or key."""
        key = self.uri_to_cache_key(lora_uri)
        if "://" in lora_uri:
            return any(_is_there(place, lora_uri) for place in self._places(lora_uri, key))
        return is_adapter(self.get_cache_path(key))

    def validate_cached(self, cache_key: str) -> bool:
        """As ``is_cached``."""
        return self.is_cached(cache_key)

    async def download_if_needed(self, lora_uri: str) -> str:
        """Local directory of an adapter; fetched if it is not there.

        A directory of a ``file://`` URI is returned as it is, and a snapshot of the hub's own cache for ``hf://``.
        Several calls for one adapter fetch it once.

        Raises:
            TypeError: ``lora_uri`` is no text.
            LoraError: There is none, or it cannot be fetched.
            ConfigError: S3 is asked for without boto3, or cannot be used.
        """
        uri = to_text("lora_uri", lora_uri)
        if uri.startswith(_FILE):
            path = uri.removeprefix(_FILE)
            if not await asyncio.to_thread(os.path.isdir, path):
                raise LoraError(uri, f"Local LoRA not found: {uri}")
            return path
        key = self.uri_to_cache_key(uri)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            return await asyncio.to_thread(self._have, uri, key)

    def _places(self, uri: str, key: str) -> tuple[Path, Path]:
        """Where an adapter may be: by its key, or by its URI if the key is taken by another one's."""
        own = hashlib.blake2b(_origin(uri), digest_size=16).hexdigest()
        return Path(self.get_cache_path(key)), Path(self.get_cache_path(f"{key}-{own}"))

    def _have(self, uri: str, key: str) -> str:
        places = self._places(uri, key)
        for place in places:
            if _is_there(place, uri):
                return str(place)
        if uri.startswith(S3):
            return self._from_s3(uri, places)
        if uri.startswith(_HUB):
            return self._from_hub(uri)
        raise LoraError(uri, f"LoRA {uri} not found in any source")

    def _from_hub(self, uri: str) -> str:
        name, _, revision = uri.removeprefix(_HUB).partition("@")
        try:
            folder = self._hub.download(name, revision or DEFAULT_REVISION)
        except ModelFetchError as error:
            raise LoraError(uri, str(error)) from error
        _check(uri, folder)
        return str(folder)

    def _from_s3(self, uri: str, places: tuple[Path, Path]) -> str:
        """Fetched beside its place and then put there, so that nobody finds half of it."""
        client = self._make_s3()
        try:
            root = places[0].parent
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".", ignore_cleanup_errors=True) as scratch:
                fetched = Path(scratch) / "lora"
                fetched.mkdir()
                if not download_folder(client, uri, fetched):
                    raise LoraError(uri, f"LoRA {uri} not found in any source")
                _check(uri, fetched)
                (fetched / _ORIGIN).write_bytes(_origin(uri))
                for number, place in enumerate(places):
                    if _put(fetched, place, Path(scratch) / f"old{number}", uri):
                        return str(place)
        except OSError as error:
            raise LoraError(uri, f"{error}; the folder of LoRAs is {self._root}") from error
        raise LoraError(uri, f"other adapters have its places {places[0]} and {places[1]}; remove one of them")


def _check(uri: str, folder: Path) -> None:
    if not is_adapter(folder):
        raise LoraError(uri, f"LoRA {uri} is not complete: it needs {_CONFIG} and one of {', '.join(_WEIGHTS)}")


def _put(fetched: Path, target: Path, aside: Path, uri: str) -> bool:
    """Move a whole adapter to its place; one that another process put there meanwhile stays. False: it is not its."""
    if target.exists() and not is_adapter(target):
        shutil.move(target, aside)
    try:
        fetched.rename(target)
    except OSError:
        if not is_adapter(target):
            raise
    return _is_there(target, uri)


def _origin(uri: str) -> bytes:
    return uri.encode(errors="surrogatepass")


def _is_there(place: Path, uri: str) -> bool:
    """Whether an adapter is there that is not another URI's. Never raises."""
    if not is_adapter(place):
        return False
    try:
        with open(place / _ORIGIN, "rb") as file:
            return file.read(_MAX_URI_BYTES) == _origin(uri)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
