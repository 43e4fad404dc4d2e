"""PrefixCache: which full blocks of a sequence can be found, or be made findable, by content."""

from __future__ import annotations

from trio_llm.core.block_pool import BlockHash, BlockPool, block_hash, root_hash
from trio_llm.core.request import Sequence


class PrefixCache:
    """A sequence's view of the pool's index by content.

    A block is known by the hash of its tokens, of all before them and of the request's salt.

    Args:
        pool: the KV blocks.
        enabled: False finds and offers nothing.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self.pool = pool
        self.enabled = enabled
        self.num_queries = 0
        """Tokens looked for, once a request."""
        self.num_hits = 0
        """Of these, tokens found."""

    def find(self, sequence: Sequence, count: int) -> list[int]:
        """The longest known run of the sequence's first `count` full blocks; takes no reference."""
        return self.pool.lookup(self._hashes(sequence, count)) if self.enabled else []

    def offer(self, sequence: Sequence) -> None:
        """Let the blocks that have become full be found from now on."""
        num_full = sequence.num_computed_tokens // self.pool.block_size
        if not self.enabled or num_full <= sequence.num_hashed_blocks:
            return
        hashes = self._hashes(sequence, num_full)
        for position in range(sequence.num_hashed_blocks, num_full):
            self.pool.register(sequence.block_table[position], hashes[position])
        sequence.num_hashed_blocks = num_full

    def count(self, sequence: Sequence) -> None:
        """Note what a sequence found when it was admitted; the first time of a request counts."""
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_computed_tokens
            self.num_queries += sequence.num_tokens
            self.num_hits += sequence.num_computed_tokens

    def _hashes(self, sequence: Sequence, count: int) -> list[BlockHash]:
        """Hashes of the first `count` blocks, each made once."""
        hashes, size = sequence.block_hashes, self.pool.block_size
        while len(hashes) < count:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            hashes.append(block_hash(parent, sequence.token_ids[start : start + size]))
        return hashes[:count]
