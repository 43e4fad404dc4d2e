"""BlockPool: who holds which KV block, and which blocks may be found again by content.

Every operation is O(1) a block.  A block is in exactly one of three states:

* used: `ref_count` >= 1; some block tables name it.
* cached: `ref_count` 0 but with a hash; it can be hit, or evicted when memory is short.
* blank: `ref_count` 0 and no hash.

Cached and blank blocks together form the free list, blank ones and the least recently
freed first, so that allocating is evicting in the right order.
"""

from __future__ import annotations

import array
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import attrs

BlockHash = bytes


def root_hash(*namespace: str) -> BlockHash:
    """The start of a hash chain.  Whatever must not share blocks (model, adapter, tenant,
    salt) differs here, and so in every hash that follows."""
    digest = hashlib.blake2b(digest_size=16)
    for part in namespace:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block: of its tokens and, through `parent`, of all before it."""
    return hashlib.blake2b(parent + array.array("Q", token_ids).tobytes(), digest_size=16).digest()


@attrs.define(eq=False)
class Block:
    id: int
    ref_count: int = 0
    hash: BlockHash | None = None
    previous: Block | None = None
    next: Block | None = None


class _FreeList:
    """A doubly linked list through the blocks: a hit takes a block out of the middle in O(1)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-2)
        self._head.next, self._tail.previous = self._tail, self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        assert self._tail.previous is not None
        self._insert(self._tail.previous, block, self._tail)

    def prepend(self, block: Block) -> None:
        assert self._head.next is not None
        self._insert(self._head, block, self._head.next)

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        block.previous, block.next = before, after
        before.next = after.previous = block
        self._length += 1

    def remove(self, block: Block) -> None:
        assert block.previous is not None and block.next is not None
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self._length -= 1

    def popleft(self) -> Block:
        block = self._head.next
        assert block is not None and block is not self._tail, "the free list is empty"
        self.remove(block)
        return block


class BlockPool:
    """Reference-counted blocks with a free list and an index by content.

    Args:
        num_blocks: blocks in the pool, ids 0 to num_blocks - 1.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = _FreeList(self._blocks)
        self._by_hash: dict[BlockHash, Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that allocate can give: blank and cached ones."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, all or none; cached ones lose their content."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            self._forget(block)
            block.ref_count = 1
            taken.append(block.id)
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block of a table.

        The table's tail comes back first and so is evicted before its head, without which
        the tail could never be hit.  Blocks with no hash go to the front: they are no use.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} was freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def num_freed_by(self, block_tables: Iterable[Sequence[int]]) -> int:
        """Blocks that would become free if all these tables were freed."""
        references = Counter(block_id for table in block_tables for block_id in table)
        return sum(self._blocks[block_id].ref_count == count for block_id, count in references.items())

    def register(self, block_id: int, content: BlockHash) -> None:
        """Let a used, full block be found by its content.  Where another block already
        bears that hash, nothing happens: tables are never rewritten."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is not in use"
        if block.hash is None and content not in self._by_hash:
            block.hash = content
            self._by_hash[content] = block

    def lookup(self, contents: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest known run at the start of a hash chain; takes no reference."""
        found = []
        for content in contents:
            block = self._by_hash.get(content)
            if block is None:
                break
            found.append(block.id)
        return found

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, bringing cached ones back into use."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                assert block.hash is not None, f"block {block_id} holds nothing"
                self._free.remove(block)
            block.ref_count += 1

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let used blocks not be found by their content any more."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is not in use"
            self._forget(block)

    def is_writable(self, block_id: int) -> bool:
        """Whether one sequence alone holds the block and nobody may find it by content."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.hash is None

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants against every block table that exists."""
        counts = [0] * len(self._blocks)
        for table in block_tables:
            assert len(set(table)) == len(table), "a block table names a block twice"
            for block_id in table:
                counts[block_id] += 1
        free = {block.id for block in self._free}
        assert len(free) == len(self._free), "the free list's length is wrong"
        for block in self._blocks:
            assert block.ref_count == counts[block.id], f"block {block.id}: {block.ref_count} references counted"
            assert (block.ref_count == 0) == (block.id in free), f"block {block.id} is lost or in use and free"
            if block.hash is not None:
                assert self._by_hash.get(block.hash) is block, f"block {block.id} is not found by its hash"
        for content, block in self._by_hash.items():
            assert block.hash == content, f"block {block.id} does not bear the hash that leads to it"
