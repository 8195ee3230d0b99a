"""Embeddings of a mock worker: every token has a direction of its own, a text is their sum, of length 1. Pure.

So equal texts have equal vectors on every machine, and texts that share tokens are nearer to each other than others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import numpy as np

from dynamo_es.errors import InvalidArgument


def is_embedding_request(request: Mapping[str, Any]) -> bool:
    """Whether a preprocessed request asks for embeddings: it has lists of token ids."""
    token_ids = request.get("token_ids")
    return isinstance(token_ids, list) and bool(token_ids) and all(isinstance(item, list) for item in token_ids)


def embed_request(request: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """A worker's answer to a request with lists of token ids.

    Args:
        request: Preprocessed request; its ``dimensions`` may ask for the first few numbers of each vector only.
        dimensions: Numbers in a whole vector.

    Raises:
        InvalidArgument: An input is empty, or there are not so many dimensions.
    """
    wanted = request.get("dimensions")
    if wanted is None:
        wanted = dimensions
    elif not isinstance(wanted, int) or not 1 <= wanted <= dimensions:
        raise InvalidArgument(f"`dimensions` must be between 1 and {dimensions}, got {wanted}")
    lists: Sequence[list[int]] = request["token_ids"]
    for place, token_ids in enumerate(lists):
        if not token_ids:
            raise InvalidArgument(f"input {place} is empty")
    tokens = sum(map(len, lists))
    vectors = [embed(token_ids, dimensions)[:wanted] for token_ids in lists]
    return {
        "embeddings": [_unit(vector).tolist() for vector in vectors],
        "prompt_tokens": tokens,
        "total_tokens": tokens,
    }


def embed(token_ids: Sequence[int], dimensions: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sum of the directions of all tokens."""
    vector = np.zeros(dimensions)
    unique, counts = np.unique(np.asarray(token_ids, np.uint32), return_counts=True)
    for token_id, count in zip(unique.tolist(), counts.tolist(), strict=True):
        digest = blake3.blake3(token_id.to_bytes(4, "little")).digest(length=4 * dimensions)
        vector += count * (np.frombuffer(digest, "<u4") / 2.0**31 - 1.0)
    return vector


def _unit(vector: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
