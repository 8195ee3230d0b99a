"""``RadixTree`` and ``OverlapScores`` of ``dynamo.llm``: a stand-alone index for scripts and tests.

It is deliberately not the index that the router asks. That one (``streams.kv_index_state``) is a fold of the log over
sequence hashes, flat, fenced by incarnation and sequence number. This one is Dynamo's: a tree over tokens hashes, fed
with JSON events by hand, blind to event ids, with block hashes as the engines choose them. It lives in memory only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from dynamo_es.router.hashing_arguments import check_bool, check_bytes, check_u64, check_u64s
from dynamo_es.router.radix_events import RemovedBlocks, StoredBlocks, parse_event
from dynamo_es.router.radix_model import BlockMismatch, DumpedBlocks, RadixModel


class OverlapScores:
    """Result of ``RadixTree.find_matches``; cannot be made by hand.

    Dynamo's documentation calls the keys worker ids; they are (worker id, data-parallel rank), as here.
    """

    __slots__ = ("_scores",)
    _scores: dict[tuple[int, int], int]

    def __new__(cls) -> OverlapScores:
        """Raises TypeError, as in Dynamo."""
        raise TypeError("No constructor defined for OverlapScores")

    def __reduce__(self) -> NoReturn:
        """Raises TypeError, as in Dynamo: it is neither pickled nor copied."""
        raise TypeError("cannot pickle 'OverlapScores' object")

    @property
    def scores(self) -> dict[tuple[int, int], int]:
        """(worker id, dp rank) to the number of matching leading blocks, at least 1. A copy."""
        return dict(self._scores)

    @property
    def frequencies(self) -> list[int]:
        """Always empty, as in Dynamo."""
        return []


class RadixTree:
    """Which worker holds which KV blocks, from the events that it is given.

    Safe from several threads: calls go one after the other. Methods are synchronous; none does I/O.
    """

    __slots__ = ("_lock", "_model")

    def __init__(self) -> None:
        self._model = RadixModel()
        self._lock = threading.Lock()

    def find_matches(self, sequence: Sequence[int], early_exit: bool = False) -> OverlapScores:
        """How many leading blocks of a prompt each worker holds.

        Args:
            sequence: Tokens hashes of the prompt's blocks (``compute_block_hash_for_seq``), each a u64.
            early_exit: Stop as soon as one worker is left. The tree looks only where chains part, so that the score
                may be lower than the match, but never higher.

        Raises:
            TypeError: An argument, or a hash, is of the wrong type.
            OverflowError: A hash is no u64.
        """
        hashes = check_u64s("sequence", sequence)
        stop_early = check_bool("early_exit", early_exit)
        with self._lock:
            scores = self._model.find(hashes, stop_early)
        return _overlap_scores(scores)

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Take in one event of a worker, as JSON (see ``radix_events`` for its form).

        Raises:
            TypeError: An argument is of the wrong type.
            OverflowError: ``worker_id`` is no u64.
            ValueError: The bytes are no event.
            RuntimeError: The event does not fit what is known of the worker: it names an unknown parent (nothing has
                changed), stores a block below itself (nothing has changed), or removes an unknown block (the others
                are removed).
        """
        worker = check_u64("worker_id", worker_id)
        event = parse_event(check_bytes("kv_cache_event_bytes", kv_cache_event_bytes))
        source = (worker, event.dp_rank)
        data = event.data
        try:
            with self._lock:
                if isinstance(data, StoredBlocks):
                    self._model.store(source, data.parent, data.block_hashes, data.tokens_hashes)
                elif isinstance(data, RemovedBlocks):
                    self._model.remove(source, data.block_hashes)
                else:
                    self._model.clear(source)
        except BlockMismatch as error:
            raise RuntimeError(f"Failed to apply event: {error}") from error

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, with all its data-parallel ranks; an unknown one is fine.

        Raises:
            TypeError, OverflowError: ``worker_id`` is no u64.
        """
        worker = check_u64("worker_id", worker_id)
        with self._lock:
            self._model.clear_ranks(worker)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Forget the blocks of all data-parallel ranks of a worker; an unknown one is fine.

        Raises:
            TypeError, OverflowError: ``worker_id`` is no u64.
        """
        # Dynamo keeps a cleared worker registered, without blocks: nobody can tell that from a removed one.
        self.remove_worker(worker_id)

    def dump_tree_as_events(self) -> list[str]:
        """Events that rebuild this tree: one JSON text for each worker and edge, parents first.

        To feed them to another tree, pass each one's ``worker_id`` and its member ``event`` to ``apply_event``. The
        order among workers and siblings is not defined.
        """
        with self._lock:
            dumped = list(self._model.dump())
        return [_to_json(event_id, blocks) for event_id, blocks in enumerate(dumped)]


def _overlap_scores(scores: dict[tuple[int, int], int]) -> OverlapScores:
    result = object.__new__(OverlapScores)
    result._scores = scores
    return result


def _to_json(event_id: int, dumped: DumpedBlocks) -> str:
    worker_id, dp_rank = dumped.worker
    blocks = [
        {"block_hash": block, "tokens_hash": tokens, "mm_extra_info": None}
        for block, tokens in zip(dumped.block_hashes, dumped.tokens_hashes, strict=True)
    ]
    stored: dict[str, Any] = {"parent_hash": dumped.parent, "start_position": None, "blocks": blocks}
    event = {
        "worker_id": worker_id,
        "storage_tier": "device",
        "residency_domain": "worker",
        "event": {"event_id": event_id, "data": {"stored": stored}, "dp_rank": dp_rank},
    }
    return json.dumps(event, separators=(",", ":"))
