"""From options to a model that is ready to compute. Everything here blocks; call it on the model's thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_es.config.transformers_options import TransformersConfig
from dynamo_es.engines.transformers_engine.engine import ModelLimits
from dynamo_es.engines.transformers_engine.gguf_files import cache_folder, unpacked_directory
from dynamo_es.engines.transformers_engine.sampling_options import DEFAULTED
from dynamo_es.engines.transformers_engine.sources import ModelSource, find_model
from dynamo_es.engines.transformers_engine.work import ModelRunner
from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.frontend.tokenizer_files import ModelFiles, load_tokenizer
from dynamo_es.models.fetch import Hub
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, read_model_facts

logger = logging.getLogger(__name__)
_EXTRA = "the Transformers engine needs the extra transformers-engine: pip install 'dynamo-es[transformers-engine]'"


@dataclass(frozen=True, slots=True)
class Material:
    """A model that is ready: what its card says, what the engine goes by, and what computes.

    ``name``: what it is called if nobody says otherwise; ``num_blocks``: of its KV pool.
    """

    facts: ModelFacts
    name: str
    limits: ModelLimits
    runner: ModelRunner
    num_blocks: int


def load_material(
    model: str, config: TransformersConfig, adapters: Mapping[str, str], env: Mapping[str, str]
) -> Material:
    """Find the model, read it, take its KV pool's memory.

    Args:
        model: A path or a name, see ``find_model``.
        config: The options.
        adapters: Folders of LoRA adapters, by name.
        env: Of the process.

    Raises:
        ConfigError: torch is not installed, the model cannot be served, or the memory is not there.
    """
    if model == BUILTIN_MODEL:
        raise ConfigError("--model is missing: a directory, a GGUF file, a package that has one, or a name on the hub")
    check_installed()
    source = find_model(model, Hub().download)
    directory = source.directory
    if source.gguf is not None:
        directory = unpacked_directory(directory, source.gguf, cache_folder(env))
    facts = read_model_facts(str(directory))
    load_tokenizer(str(directory))  # fails here rather than in every frontend
    return _load(source, facts, config, adapters)


def check_installed() -> None:
    """Raises ``ConfigError``: a library of the extra is missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"{_EXTRA} ({error})") from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(f"{_EXTRA}: transformers {transformers.__version__} is too old, it takes 5.0 or later")
    logger.debug("torch %s, transformers %s", torch.__version__, transformers.__version__)


def blocks_that_fit(kv_cache_bytes: int, block_bytes: int, wanted: int | None) -> int:
    """Blocks of the pool. Raises ``ConfigError``: there would be none."""
    if wanted is not None:
        return wanted
    fitting = kv_cache_bytes // block_bytes
    if fitting < 1:
        raise ConfigError(f"--kv-cache-bytes={kv_cache_bytes}: one block of this model takes {block_bytes}")
    return fitting


def context_of(model_says: int, window: int | None, wanted: int | None) -> int:
    """Longest prompt with its answer, in tokens.

    Args:
        model_says: By the model's configuration; 0: it says nothing.
        window: Behind it some layer sees nothing. The pool has whole sequences only, so a longer one is not served.
        wanted: ``--max-model-len``.

    Raises:
        ConfigError: More is wanted than there is, or nothing is known.
    """
    bounds = [bound for bound in (model_says, window) if bound]
    if not bounds and wanted is None:
        raise ConfigError("--max-model-len is missing: the model's configuration does not say its context")
    most = min(bounds, default=wanted or 0)
    if wanted is not None and wanted > most:
        raise ConfigError(f"--max-model-len={wanted}: the model's context is {most} tokens")
    if window is not None and window < model_says:
        logger.warning("the model's context is cut to %d tokens, the attention window of its layers", most)
    return wanted or most


def _load(source: ModelSource, facts: ModelFacts, config: TransformersConfig, adapters: Mapping[str, str]) -> Material:
    import torch

    from dynamo_es.engines.transformers_engine import model_loading
    from dynamo_es.engines.transformers_engine.model_adapters import ModelAdapters
    from dynamo_es.engines.transformers_engine.model_runner import TorchRunner
    from dynamo_es.engines.transformers_engine.paged_cache import KvPool, bytes_per_token

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = model_loading.pick_device(config.device)
    loaded = model_loading.load_model(source, device, config.dtype)
    model = loaded.model
    over = ModelAdapters(model)
    for name, folder in adapters.items():
        try:
            over.load(name, folder)
        except InvalidArgument as error:
            raise ConfigError(f"--lora {name}: {error}") from error
    block_bytes = bytes_per_token(loaded.shapes, model.dtype) * config.block_size
    num_blocks = blocks_that_fit(config.kv_cache_bytes, block_bytes, config.num_blocks)
    try:
        pool = KvPool(loaded.shapes, num_blocks, config.block_size, model.dtype, device)
    except RuntimeError as error:
        size = num_blocks * block_bytes
        raise ConfigError(f"the KV pool of {size} bytes (--kv-cache-bytes) does not fit {device}: {error}") from error
    limits = ModelLimits(
        context_of(facts.context_length, loaded.window, config.max_model_len),
        loaded.vocab_size,
        loaded.eos_token_ids,
        sampling_defaults(ModelFiles(Path(facts.source_path)).generation),
        frozenset(adapters),
    )
    logger.info(
        "%s on %s in %s: %d KV blocks of %d tokens, %d bytes",
        source.name, device, model.dtype, num_blocks, config.block_size, num_blocks * block_bytes,
    )  # fmt: skip
    return Material(facts, source.name, limits, TorchRunner(model, pool, over), num_blocks)


def sampling_defaults(generation: Mapping[str, object]) -> dict[str, float]:
    """What a model's generation_config.json says of sampling."""
    return {
        name: value
        for name in DEFAULTED
        if isinstance(value := generation.get(name), int | float) and not isinstance(value, bool)
    }
