"""BlockPool against a naive model, its hashes, and whether check() sees what is broken."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_llm.core.block_pool import BlockPool, block_hash, root_hash

from .helpers import count_calls

NUM_BLOCKS = 9
CONTENTS = [bytes([letter]) for letter in b"abcdefg"]


class BlockPoolMachine(RuleBasedStateMachine):
    """The naive model keeps no list: for each block its references, its hash, and when it was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.freed_at: dict[int, int] = {}
        self.clock = itertools.count()

    def references(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.tables)

    def free_ids(self) -> set[int]:
        return {block_id for block_id in range(NUM_BLOCKS) if not self.references(block_id)}

    def cached_by_age(self) -> list[int]:
        return sorted(self.free_ids() & self.hashes.keys(), key=lambda block_id: self.freed_at[block_id])

    def owner(self, content: bytes) -> int | None:
        return next((block_id for block_id, known in self.hashes.items() if known == content), None)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        blank, cached = self.free_ids() - self.hashes.keys(), self.cached_by_age()
        taken = self.pool.allocate(count)
        if count > len(blank) + len(cached):
            assert taken is None
            return
        assert taken is not None and len(taken) == count == len(set(taken))
        # blank ones first, in whatever order, then the least recently freed
        assert set(taken[: len(blank)]) <= blank
        assert taken[len(blank) :] == cached[: max(0, count - len(blank))]
        for block_id in taken:
            self.hashes.pop(block_id, None)
        if taken:
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        for block_id in reversed(table):  # the tail counts as freed before the head
            self.freed_at[block_id] = next(self.clock)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def hold_a_prefix(self, data: st.DataObject) -> None:
        """Another sequence shares the head of a table that is in use."""
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(1, len(table)))]
        self.pool.hold(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def register(self, data: st.DataObject, content: bytes) -> None:
        block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.pool.register(block_id, content)
        if block_id not in self.hashes and self.owner(content) is None:
            self.hashes[block_id] = content

    @rule(contents=st.permutations(CONTENTS), hold=st.booleans())
    def lookup(self, contents: list[bytes], hold: bool) -> None:
        found = self.pool.lookup(iter(contents))
        owners = [self.owner(content) for content in contents]
        known = list(itertools.takewhile(lambda owner: owner is not None, owners))
        assert found == known
        if hold and found:
            self.pool.hold(found)
            self.tables.append(found)

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free_blocks == len(self.free_ids())
        assert self.pool.num_blocks == NUM_BLOCKS
        for block_id in range(NUM_BLOCKS):
            assert self.pool.is_writable(block_id) == (self.references(block_id) == 1 and block_id not in self.hashes)
        for content in CONTENTS:
            owner = self.owner(content)
            assert self.pool.lookup([content]) == ([] if owner is None else [owner])


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(count) for count in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_free_blocks == 3
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_an_evicted_block_is_found_no_more_and_the_tail_goes_before_the_head() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(3)
    assert table is not None
    chain = [b"head", b"middle", b"tail"]
    for block_id, content in zip(table, chain, strict=True):
        pool.register(block_id, content)
    pool.free(table)
    assert pool.lookup(chain) == table
    taken = pool.allocate(1)
    assert taken == table[2:]
    assert pool.lookup(chain) == table[:2]
    pool.check([taken])


def test_a_hit_brings_a_block_back_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(4)
    assert table is not None
    for block_id in table:
        pool.register(block_id, bytes([block_id]))
    pool.free(table)
    pool.hold([table[2]])
    pool.check([[table[2]]])
    assert pool.allocate(3) == [table[3], table[1], table[0]]


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(1)
    assert table is not None
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_a_blank_block_cannot_be_held_and_a_free_one_not_registered() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError):
        pool.hold([0])
    with pytest.raises(AssertionError):
        pool.register(0, b"content")


def test_root_hashes_do_not_collide_by_concatenation() -> None:
    namespaces = [
        (), ("",), ("", ""), ("ab",), ("a", "b"), ("ab", ""), ("", "ab"), ("a", "", "b"), ("b", "a"),
        ("a\x00b",), ("a\x00", "b"), ("\x01", "\x00" * 7), ("é",), ("e\u0301",),
    ]  # fmt: skip
    assert len({root_hash(*namespace) for namespace in namespaces}) == len(namespaces)
    # a part that imitates the length prefix of the next
    assert root_hash("a" + "\x01" + "\x00" * 7 + "b") != root_hash("a", "b")


def test_a_block_hash_depends_on_parents_tokens_order_and_length() -> None:
    root, other = root_hash("model"), root_hash("model", "salt")
    hashes = [
        block_hash(root, [1, 2, 3, 4]),
        block_hash(other, [1, 2, 3, 4]),
        block_hash(root, [4, 3, 2, 1]),
        block_hash(root, [1, 2, 3]),
        block_hash(root, [1, 2, 3, 4, 0]),
        block_hash(root, [0, 1, 2, 3, 4]),
        block_hash(root, [1 + 2**32, 2, 3, 4]),
        block_hash(block_hash(root, [1, 2]), [3, 4]),
        block_hash(block_hash(other, [1, 2]), [3, 4]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert block_hash(root, (1, 2, 3, 4)) == hashes[0]


def _pool_with_everything() -> tuple[BlockPool, list[list[int]]]:
    """Used blocks 0 and 1 (0 with a hash), a cached block, and blanks."""
    pool = BlockPool(5, 4)
    table, past = pool.allocate(2), pool.allocate(1)
    assert table is not None and past is not None
    pool.register(table[0], b"used")
    pool.register(past[0], b"cached")
    pool.free(past)
    pool.check([table])
    return pool, [table]


def _lose_a_free_block(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._free.popleft()


def _free_a_used_block(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._free.append(pool._blocks[tables[0][1]])


def _count_too_many(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._blocks[tables[0][0]].ref_count += 1


def _count_too_few(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._blocks[tables[0][0]].ref_count -= 1


def _leak_a_table(pool: BlockPool, tables: list[list[int]]) -> None:
    tables.clear()


def _share_without_holding(pool: BlockPool, tables: list[list[int]]) -> None:
    tables.append(list(tables[0]))


def _name_a_block_twice(pool: BlockPool, tables: list[list[int]]) -> None:
    tables[0].append(tables[0][0])
    pool._blocks[tables[0][0]].ref_count += 1


def _forget_a_hash(pool: BlockPool, tables: list[list[int]]) -> None:
    del pool._by_hash[b"used"]


def _keep_a_stale_hash(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._by_hash[b"stale"] = pool._blocks[4]


def _swap_hashes(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._by_hash[b"used"], pool._by_hash[b"cached"] = pool._by_hash[b"cached"], pool._by_hash[b"used"]


def _miscount_the_free_list(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._free._length += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        _lose_a_free_block,
        _free_a_used_block,
        _count_too_many,
        _count_too_few,
        _leak_a_table,
        _share_without_holding,
        _name_a_block_twice,
        _forget_a_hash,
        _keep_a_stale_hash,
        _swap_hashes,
        _miscount_the_free_list,
    ],
)
def test_check_sees_planted_corruption(corrupt: Callable[[BlockPool, list[list[int]]], None]) -> None:
    pool, tables = _pool_with_everything()
    corrupt(pool, tables)
    with pytest.raises(AssertionError):
        pool.check(tables)


# -- what it costs


@pytest.mark.parametrize("num_blocks", [10, 100])
def test_a_block_costs_the_same_in_a_pool_of_any_size(num_blocks: int) -> None:
    """Allocating (which evicts where all free blocks are cached), registering, freeing, finding and holding."""

    def costs(size: int, count: int) -> list[int]:
        pool = BlockPool(size, 4)
        everything = pool.allocate(size)
        assert everything is not None
        for block in everything:
            pool.register(block, b"old %d" % block)
        pool.free(everything)
        names = [b"new %d" % number for number in range(count)]
        table: list[int] = []

        def register() -> None:
            for block, name in zip(table, names, strict=True):
                pool.register(block, name)

        return [
            count_calls(lambda: table.extend(pool.allocate(count) or [])),
            count_calls(register),
            count_calls(lambda: pool.free(table)),
            count_calls(lambda: pool.lookup(names)),
            count_calls(lambda: pool.hold(table)),
        ]

    assert costs(200, num_blocks) == costs(20_000, num_blocks)
    for one, ten in zip(costs(200, num_blocks // 10), costs(200, num_blocks), strict=True):
        assert ten <= 10 * one
