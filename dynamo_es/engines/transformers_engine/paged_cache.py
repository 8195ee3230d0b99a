"""The KV pool as a cache of transformers: new keys and values go into blocks, attention gets the sequences' own.

Only attention layers without a window; ``model_loading`` refuses the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's keys and values of a layer are: heads and width of each."""

    key: tuple[int, int]
    value: tuple[int, int]


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Of all layers."""
    numbers = sum(heads * width for shape in shapes for heads, width in (shape.key, shape.value))
    return numbers * int(dtype.itemsize)


class KvPool:
    """Blocks of all layers, numbered alike. Their memory is taken at once."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises RuntimeError (torch's own, out of memory among them): the device has not so much room."""
        self.block_size = block_size
        # Zeros, not whatever was there: a masked token has the weight 0, and 0 times infinity is not 0.
        self.layers = [
            tuple(
                torch.zeros((num_blocks, block_size, heads, width), dtype=dtype, device=device)
                for heads, width in (shape.key, shape.value)
            )
            for shape in shapes
        ]


class PagedCache(Cache):
    """The cache of one forward call over sequences of equally many new tokens.

    ``tables``: blocks of each sequence [sequences, blocks], filled up with any block; ``slots``: places of the new
    tokens in the pool [sequences * new tokens]; ``length``: tokens of the longest sequence, the new ones included.
    """

    def __init__(self, pool: KvPool, tables: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._pool = pool
        self._tables = tables
        self._slots = slots
        self._length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [sequences, heads, new tokens, width] and read all of the sequences, as [sequences, heads, length,
        width].
        """
        keys, values = self._pool.layers[layer_idx]
        return self._exchange(keys, key_states), self._exchange(values, value_states)

    def _exchange(self, pool: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        heads, width = states.shape[1], states.shape[3]
        pool.view(-1, heads, width).index_copy_(0, self._slots, states.transpose(1, 2).reshape(-1, heads, width))
        found = pool.index_select(0, self._tables.flatten()).view(self._tables.shape[0], -1, heads, width)
        return found[:, : self._length].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new ones; models are given positions and a mask, so nothing depends on it."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens and offset of a mask that a model would make by itself."""
        return self._length, 0
