"""Loads a model with transformers, and measures what its KV cache takes. The model's thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dynamo_es.engines.transformers_engine.paged_cache import LayerShape
from dynamo_es.engines.transformers_engine.sources import ModelSource
from dynamo_es.errors import ConfigError

logger = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        model: Of transformers.
        shapes: Of each layer's keys and values.
        window: Tokens behind which a layer sees nothing; None: all see everything.
        vocab_size: Of its logits.
        eos_token_ids: As its generation configuration has them.
    """

    model: Any
    shapes: list[LayerShape]
    window: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def pick_device(wanted: str) -> torch.device:
    """``auto``: a GPU if there is one. Raises ``ConfigError``."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: torch knows no such device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {wanted}: torch finds no GPU here")
    return device


def load_model(source: ModelSource, device: torch.device, dtype: str) -> LoadedModel:
    """Read the weights and try the model out. Blocks.

    Args:
        source: Where it is; weights of a GGUF file are dequantized.
        device: Where it computes.
        dtype: ``auto``: float32 on a CPU, else the model's own.

    Raises:
        ConfigError: It cannot be read, or is no decoder whose layers all have an ordinary KV cache.
    """
    chosen = _DTYPES.get(dtype) or (torch.float32 if device.type == "cpu" else "auto")
    where = source.directory if source.gguf is None else source.directory / source.gguf
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(source.directory), gguf_file=source.gguf, dtype=chosen, local_files_only=True, trust_remote_code=False
        )
    # transformers has no class of its own either for files that are missing or broken, nor for models that it has not.
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"{where}: transformers cannot load it as a causal language model: {error}") from error
    model = model.eval().to(device)
    shapes, window, vocab_size = _try_out(model, str(where))
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return LoadedModel(model, shapes, window, vocab_size, ids)


def _try_out(model: Any, where: str) -> tuple[list[LayerShape], int | None, int]:
    """What the layers keep of a token, the shortest window, and the number of logits."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        output = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
    shapes, windows = [], []
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows.append(int(layer.sliding_window))
        elif type(layer) is not DynamicLayer or layer.keys is None:
            raise ConfigError(
                f"{where}: a layer of it keeps a {type(layer).__name__}; the Transformers engine serves decoders with "
                "ordinary attention only. A vLLM worker serves more"
            )
        shapes.append(LayerShape(_shape(layer.keys), _shape(layer.values)))
    return shapes, min(windows, default=None), int(output.logits.shape[-1])


def _shape(states: torch.Tensor) -> tuple[int, int]:
    return int(states.shape[1]), int(states.shape[3])
