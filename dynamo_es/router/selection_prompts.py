"""From a prompt as it was given to the hashes by which it is looked up and booked (spec: router-core E.4). Pure."""

from __future__ import annotations

from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.cost_selector import PreparedPrompt
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks
from dynamo_es.router.hashing_tracking import TrackingScope
from dynamo_es.router.selection_requests import PartitionKey, PromptFields
from dynamo_es.router.tracking import TrackingIdentities


class PromptHasher:
    """Hashes the prompts of one partition. Every method raises ValueError, in Dynamo's words, for what is none."""

    def __init__(self, partition: PartitionKey, block_size: int, is_eagle: bool, tracking: TrackingIdentities) -> None:
        """``is_eagle``: of prompts that do not say."""
        self._partition = partition
        self._block_size = block_size
        self._is_eagle = is_eagle
        self._tracking = tracking

    def prepare(self, prompt: PromptFields, settings: KvRouterSettings) -> PreparedPrompt:
        """For a question to the index: needs tokens, or block hashes and sequence hashes."""
        if prompt.token_ids is not None:
            return self._hash_tokens(prompt, settings)
        if prompt.block_hashes is None:
            raise ValueError("block_hashes is required without token_ids")
        prepared = self._take_hashes(prompt, settings)
        if len(prompt.block_hashes) != len(prepared.sequence_hashes):
            raise ValueError(
                f"block_hashes length {len(prompt.block_hashes)} must match sequence_hashes length "
                f"{len(prepared.sequence_hashes)}"
            )
        if not prepared.isl_tokens:
            raise ValueError("isl_tokens must be greater than 0")
        return prepared

    def prepare_selection(self, prompt: PromptFields, settings: KvRouterSettings) -> PreparedPrompt:
        """As ``prepare``, for a prompt that a worker is to be chosen for: it has a token at least."""
        prepared = self.prepare(prompt, settings)
        if not prepared.isl_tokens:
            raise ValueError("isl_tokens must be greater than 0")
        return prepared

    def prepare_booking(self, prompt: PromptFields, settings: KvRouterSettings) -> PreparedPrompt:
        """For a booking whose worker is known: needs tokens, or sequence hashes."""
        if prompt.token_ids is not None:
            return self._hash_tokens(prompt, settings)
        return self._take_hashes(prompt, settings)

    def _take_hashes(self, prompt: PromptFields, settings: KvRouterSettings) -> PreparedPrompt:
        if prompt.sequence_hashes is None:
            raise ValueError("sequence_hashes is required without token_ids")
        if prompt.isl_tokens is None:
            raise ValueError("isl_tokens is required without token_ids")
        hashes = prompt.sequence_hashes
        return PreparedPrompt(prompt.isl_tokens, prompt.block_hashes or (), hashes, hashes, settings)

    def _hash_tokens(self, prompt: PromptFields, settings: KvRouterSettings) -> PreparedPrompt:
        tokens = prompt.token_ids
        assert tokens is not None
        is_eagle = self._is_eagle if prompt.is_eagle is None else prompt.is_eagle
        seed = block_seed(prompt.lora_name, prompt.cache_salt)
        tokens_hashes = hash_blocks(tokens, self._block_size, seed, is_eagle=is_eagle, mm_hashes=prompt.mm_hashes)
        sequence_hashes = compute_sequence_hashes(tokens_hashes)
        scope = TrackingScope(
            self._partition.model_name,
            self._partition.routing_group,
            self._block_size,
            prompt.cache_salt,
            prompt.lora_name,
            is_eagle,
        )
        tracked = self._tracking.identities(
            tokens,
            sequence_hashes,
            scope,
            assume_reuse=settings.router_assume_kv_reuse,
            mm_hashes=prompt.mm_hashes,
        )
        return PreparedPrompt(len(tokens), tokens_hashes, sequence_hashes, tracked, settings)
