"""Fetching models from a Hugging Face hub (Dynamo's ``fetch_model``; spec/services d.9)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_es.models.errors import ModelFetchError
from dynamo_es.router.config_arguments import to_boolean, to_text

DEFAULT_REVISION = "main"
# Everything that is large and that a frontend does not need.
WEIGHT_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ckpt",
)  # fmt: skip
_MAX_DETAIL = 500


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to fetch from and to; None: what the environment says (``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``)."""

    endpoint: str | None = None
    cache_dir: Path | None = None
    token: str | None = field(default=None, repr=False)

    def download(self, name: str, revision: str = DEFAULT_REVISION, *, ignore_weights: bool = False) -> Path:
        """Directory of a whole model, fetched if it is not there yet. Blocks.

        Raises:
            ModelFetchError: No such model or revision, or the hub cannot be reached.
        """
        # Slow to import, and engines that have their model at hand never need them.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            from httpx import HTTPError as TransportError
        except ImportError:  # the library before 1.0, whose transport raises OSError
            TransportError = OSError  # type: ignore[misc, assignment] # noqa: N806

        try:
            found = snapshot_download(
                name,
                revision=revision,
                cache_dir=self.cache_dir,
                endpoint=self.endpoint,
                token=self.token,
                ignore_patterns=list(WEIGHT_FILES) if ignore_weights else None,
            )
        except (HFValidationError, HfHubHTTPError, TransportError, OSError, ValueError) as error:
            raise ModelFetchError(name, revision, str(error)[:_MAX_DETAIL]) from error
        return Path(found)


async def fetch_model(remote_name: str, ignore_weights: bool = False, *, hub: Hub | None = None) -> str:
    """Fetch a model from the Hugging Face hub; returns its local directory. A name on the hub, never a local path.

    ``ignore_weights`` leaves out the weights: enough to register, tokenize and route. ``hub``: another one than the
    environment names. Not in Dynamo.

    Raises:
        TypeError: An argument is of the wrong type.
        ModelFetchError: No such model, or the hub cannot be reached.
    """
    name, lean = to_text("remote_name", remote_name), to_boolean("ignore_weights", ignore_weights)
    return str(await asyncio.to_thread((hub or Hub()).download, name, ignore_weights=lean))
