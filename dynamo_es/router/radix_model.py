"""A radix tree over tokens hashes that knows which worker holds which block (spec: router-core B.2 to B.7). Pure.

A node's edge is a run of blocks that always occurred together: pairs of a tokens hash, by which the tree is walked,
and a block hash, by which events name parents and removed blocks. A worker covers the whole edge (``full``) or its
first k blocks (``cut``). Per worker, ``_lookup`` leads from a block hash to its node. Edges grow at their end while
the node has had no child, and are split where chains part.

Block hashes are the engines' own. The tree keeps those of the worker that stored a chain first; another worker that
has other names for the same chain counts for matches, but cannot remove or extend it by its own names.

Removing a block from the middle of an edge removes the rest of that edge with it. Blocks in nodes further down stay
registered, unreachable until the block comes back, as long as some worker covers their parent; if none does, the nodes
below are let go for all workers.

A node that all workers left keeps its block hashes for whoever comes next. Such nodes are swept out when more of them
may have piled up than there are nodes in use (``dead_node_limit`` at least): the one thing in which this differs from
Dynamo, which keeps them for ever.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from dynamo_es.errors import DynamoException

Worker = tuple[int, int]
"""Worker id and data-parallel rank."""

DEAD_NODE_LIMIT = 65_536
"""At this many deaths of nodes a sweep pays: it visits every node, and a dead one takes about 1 KiB."""


class BlockMismatch(DynamoException):
    """An event does not fit what the tree knows of its worker. What of it does fit has been applied."""


class DumpedBlocks(NamedTuple):
    """Blocks that a worker holds, in order, below the block ``parent``."""

    worker: Worker
    parent: int | None
    block_hashes: Sequence[int]
    tokens_hashes: Sequence[int]


class _Node:
    __slots__ = ("_positions", "blocks", "children", "cut", "full", "internal", "tokens")

    def __init__(self, tokens: array[int], blocks: list[int]) -> None:
        # Packed, so that an edge is compared with a prompt at once.
        self.tokens = tokens
        self.blocks = blocks
        # Last position of each block hash (one may occur twice in an edge), once somebody asks for one of the middle.
        self._positions: dict[int, int] | None = None
        self.full: set[Worker] = set()
        self.cut: dict[Worker, int] = {}
        self.children: dict[int, _Node] = {}
        # Set for good with the first child: an edge with children cannot grow.
        self.internal = False

    def position(self, block: int) -> int | None:
        """Last place of a block hash in the edge. Most that are asked for are the last of all."""
        if self._positions is None:
            if self.blocks and self.blocks[-1] == block:
                return len(self.blocks) - 1
            self._positions = dict(zip(self.blocks, range(len(self.blocks)), strict=True))
        return self._positions.get(block)

    def append(self, tokens: array[int], blocks: Sequence[int]) -> None:
        if self._positions is not None:
            self._positions.update(zip(blocks, range(len(self.blocks), len(self.blocks) + len(blocks)), strict=True))
        self.blocks.extend(blocks)
        self.tokens.extend(tokens)

    def cut_off(self, at: int) -> tuple[array[int], list[int]]:
        """Keep the first ``at`` blocks; the rest."""
        rest = self.tokens[at:], self.blocks[at:]
        # Not counted anew: a block hash that occurs in both parts belongs to the lower one only.
        positions = (
            dict(zip(self.blocks, range(len(self.blocks)), strict=True)) if self._positions is None else self._positions
        )
        self._positions = {block: position for block, position in positions.items() if position < at}
        del self.tokens[at:], self.blocks[at:]
        return rest

    def cover(self, worker: Worker) -> int:
        return len(self.blocks) if worker in self.full else self.cut.get(worker, 0)

    def raise_cover(self, worker: Worker, count: int) -> None:
        if count >= len(self.blocks):
            self.cut.pop(worker, None)
            self.full.add(worker)
        elif count > self.cover(worker):
            self.cut[worker] = count

    def lower_cover(self, worker: Worker, count: int) -> None:
        """Cover only ``count`` blocks from now on. Without a worker on the whole edge, what is below is let go."""
        self.full.discard(worker)
        if count:
            self.cut[worker] = count
        else:
            self.cut.pop(worker, None)
        if not self.full:
            self.children = {}

    @property
    def live(self) -> bool:
        return bool(self.full or self.cut)


class RadixModel:
    """The tree. Not thread-safe. Hashes are unsigned 64-bit."""

    def __init__(self, dead_node_limit: int = DEAD_NODE_LIMIT) -> None:
        self._root = _Node(array("Q"), [])
        self._lookup: dict[Worker, dict[int, _Node]] = {}
        self._least_deaths = dead_node_limit
        self._deaths_to_sweep = dead_node_limit
        self._deaths = 0

    def store(self, worker: Worker, parent: int | None, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """The worker now holds these blocks, below its block ``parent`` or at the start.

        Args:
            worker: Who stored them.
            parent: A block hash that this worker stored before.
            blocks: Block hashes.
            tokens: Tokens hashes of the same blocks; an array of typecode Q is taken as it is.

        Raises:
            BlockMismatch: The worker does not hold ``parent``, or it is one of the blocks. Nothing has changed.
        """
        tokens = _packed(tokens)
        lookup = self._lookup.setdefault(worker, {})
        if parent is None:
            self._store_below(self._root, worker, blocks, tokens)
            return
        if parent in blocks:
            raise BlockMismatch("Invalid block sequence")
        node = lookup.get(parent)
        position = None if node is None else node.position(parent)
        if node is None or position is None:
            raise BlockMismatch("Failed to find parent block")
        if position >= node.cover(worker):
            del lookup[parent]
            raise BlockMismatch("Failed to find parent block")
        self._store_behind(node, position + 1, worker, blocks, tokens)

    def remove(self, worker: Worker, blocks: Sequence[int]) -> None:
        """The worker no longer holds these blocks, nor what follows them on the same edge.

        Raises:
            BlockMismatch: It did not hold one of them. The others are removed.
        """
        lookup = self._lookup.get(worker, {})
        stale: set[int] = set()
        complete = True
        at = 0
        while at < len(blocks):
            block = blocks[at]
            at += 1
            node = lookup.get(block)
            if node is None:
                complete = complete and block in stale
                continue
            position = node.position(block)
            if position is None:
                complete = False
                continue
            del lookup[block]
            stale.add(block)
            cover = node.cover(worker)
            if position >= cover:
                continue
            # A run of blocks of this edge is one truncation.
            while at < len(blocks) and lookup.get(blocks[at]) is node:
                next_position = node.position(blocks[at])
                if next_position is None or next_position >= cover:
                    break
                del lookup[blocks[at]]
                position = min(position, next_position)
                at += 1
            for dropped in node.blocks[position:cover]:
                stale.add(dropped)
                lookup.pop(dropped, None)
            self._lower_cover(node, worker, position)
        self._sweep_if_due()
        if not complete:
            raise BlockMismatch("Failed to find block")

    def clear(self, worker: Worker) -> None:
        """Forget this worker rank; an unknown one is fine."""
        nodes = set(self._lookup.pop(worker, {}).values())
        for node in nodes:
            self._lower_cover(node, worker, 0)
        self._sweep_if_due()

    def clear_ranks(self, worker_id: int) -> None:
        """Forget all ranks of a worker; an unknown one is fine."""
        for worker in [worker for worker in self._lookup if worker[0] == worker_id]:
            self.clear(worker)

    def find(self, tokens: Sequence[int], early_exit: bool = False) -> dict[Worker, int]:
        """How many leading blocks of ``tokens`` each worker holds; workers without any are absent.

        Args:
            tokens: Tokens hashes of a prompt; an array of typecode Q is taken as it is.
            early_exit: Stop at the end of an edge as soon as one worker is left.
        """
        tokens = _packed(tokens)
        length = len(tokens)
        scores: dict[Worker, int] = {}
        active: set[Worker] = set()
        children = self._root.children
        depth = 0
        while depth < length:
            node = children.get(tokens[depth])
            if node is None:
                break
            edge, full = node.tokens, node.full
            matched = len(edge) if not depth and edge == tokens else _common_prefix(edge, tokens, depth)
            if not depth:
                active = full
                if node.cut:
                    scores.update((worker, min(count, matched)) for worker, count in node.cut.items())
            elif not active <= full:
                for worker in active - full:
                    scores[worker] = depth + min(node.cut.get(worker, 0), matched)
                active = active & full
            depth += matched
            if not active or matched < len(edge) or (early_exit and len(active) == 1):
                break
            children = node.children
        for worker in active:
            scores[worker] = depth
        return scores

    def names(self, tokens: Sequence[int]) -> list[int]:
        """Block hashes by which the tree knows the leading blocks of ``tokens``, as far as it knows any."""
        tokens = _packed(tokens)
        names: list[int] = []
        children = self._root.children
        while len(names) < len(tokens) and (node := children.get(tokens[len(names)])) is not None:
            matched = _common_prefix(node.tokens, tokens, len(names))
            names.extend(node.blocks[:matched])
            if matched < len(node.tokens):
                break
            children = node.children
        return names

    def dump(self) -> Iterator[DumpedBlocks]:
        """What must be stored in an empty tree, in this order, to find the same again. Breadth first."""
        queue: deque[tuple[int | None, _Node]] = deque((None, node) for node in self._root.children.values())
        while queue:
            parent, node = queue.popleft()
            tokens, blocks = list(node.tokens), list(node.blocks)
            while (child := _continuation(node)) is not None:
                tokens += child.tokens
                blocks += child.blocks
                node = child
            for worker in node.full:
                yield DumpedBlocks(worker, parent, blocks, tokens)
            for worker, count in node.cut.items():
                yield DumpedBlocks(worker, parent, blocks[:count], tokens[:count])
            queue.extend((blocks[-1], child) for child in node.children.values())

    def _store_behind(self, node: _Node, start: int, worker: Worker, blocks: Sequence[int], tokens: array[int]) -> None:
        """Store below the block before ``start`` of the node's edge, which the worker covers."""
        rest = len(node.blocks) - start
        shared = min(rest, len(blocks))
        same = (
            node.blocks[start : start + shared] == blocks[:shared]
            and node.tokens[start : start + shared] == tokens[:shared]
        )
        if same and len(blocks) <= rest:
            node.raise_cover(worker, start + len(blocks))
            self._look_up(worker, blocks, node)
        elif same and not node.internal:
            self._look_up(worker, blocks[:rest], node)
            self._append(node, worker, blocks[rest:], tokens[rest:])
        else:
            if rest:
                self._split(node, start)
            self._store_below(node, worker, blocks, tokens)

    def _store_below(self, node: _Node, worker: Worker, blocks: Sequence[int], tokens: array[int]) -> None:
        """Store below the last block of a node that the worker covers fully, or below the root."""
        at = 0
        while at < len(blocks):
            child = node.children.get(tokens[at])
            if child is None:
                self._grow(node, worker, blocks[at:], tokens[at:])
                return
            matched = _common_prefix(child.tokens, tokens, at)
            if matched < len(child.tokens) and at + matched < len(blocks):
                self._split(child, matched)
            child.raise_cover(worker, matched)
            self._look_up(worker, blocks[at : at + matched], child)
            at += matched
            node = child

    def _grow(self, node: _Node, worker: Worker, blocks: Sequence[int], tokens: array[int]) -> None:
        if node is not self._root and not node.internal and worker in node.full:
            self._append(node, worker, blocks, tokens)
            return
        child = _Node(tokens[:], list(blocks))
        child.full.add(worker)
        node.children[tokens[0]] = child
        node.internal = True
        self._look_up(worker, blocks, child)

    def _append(self, node: _Node, worker: Worker, blocks: Sequence[int], tokens: array[int]) -> None:
        length = len(node.blocks)
        for other in node.full:
            node.cut[other] = length
        node.cut.pop(worker, None)
        node.full = {worker}
        node.append(tokens, blocks)
        self._look_up(worker, blocks, node)

    def _split(self, node: _Node, at: int) -> None:
        """Let ``node`` keep the first ``at`` blocks of its edge; a new only child takes the rest."""
        lower = _Node(*node.cut_off(at))
        lower.children, lower.internal = node.children, node.internal
        lower.full = set(node.full)
        lower.cut = {worker: count - at for worker, count in node.cut.items() if count > at}
        node.full.update(worker for worker, count in node.cut.items() if count >= at)
        node.cut = {worker: count for worker, count in node.cut.items() if count < at}
        node.children = {lower.tokens[0]: lower}
        node.internal = True
        for worker, count in chain(((worker, len(lower.blocks)) for worker in lower.full), lower.cut.items()):
            # A worker that was forgotten may still stand in a node, if block hashes were not unique: Dynamo dies of it.
            if worker in self._lookup:
                self._look_up(worker, lower.blocks[:count], lower)

    def _look_up(self, worker: Worker, blocks: Sequence[int], node: _Node) -> None:
        lookup = self._lookup[worker]
        for block in blocks:
            lookup[block] = node

    def _lower_cover(self, node: _Node, worker: Worker, count: int) -> None:
        was_live = node.live
        node.lower_cover(worker, count)
        self._deaths += was_live and not node.live

    def _sweep_if_due(self) -> None:
        if self._deaths < self._deaths_to_sweep:
            return
        kept = 0
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            node.children = {token: child for token, child in node.children.items() if child.live}
            kept += len(node.children)
            nodes.extend(node.children.values())
        self._deaths = 0
        self._deaths_to_sweep = max(self._least_deaths, kept)


def _packed(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("Q", tokens)


def _common_prefix(edge: array[int], tokens: array[int], start: int) -> int:
    """How many leading items of ``edge`` stand in ``tokens`` from ``start`` on."""
    length = min(len(edge), len(tokens) - start)
    if edge[:length] == tokens[start : start + length]:
        return length
    return next(place for place in range(length) if edge[place] != tokens[start + place])


def _continuation(node: _Node) -> _Node | None:
    """The one live child that the same workers cover, if the edges are one for everyone."""
    if node.cut:
        return None
    live = [child for child in node.children.values() if child.live]
    if len(live) == 1 and not live[0].cut and live[0].full == node.full:
        return live[0]
    return None
