"""The block pool of a virtual engine, with what `kvtier.connectors.vllm.compat.EnginePool` reads of vLLM's: numbered
blocks with reference counts, a queue of the free ones in the order in which they are handed out, and names.

As in vLLM a free block keeps its name until it is handed out again, two blocks may have equal names, a name is a new
object each time, and block 0 is nobody's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace

GROUP = (0).to_bytes(4, "big")
"""Number of the group of full attention, at the end of a name."""


class PoolBlock:
    """`block_hash`: its name. `next_free_block`: of the queue, if it is free."""

    __slots__ = ("before", "block_hash", "block_id", "is_null", "next_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.ref_cnt = 0
        self.is_null = block_id == 0
        self.before: PoolBlock | None = None
        self.next_free_block: PoolBlock | None = None


class _Queue:
    """Free blocks, those that are handed out next first."""

    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = PoolBlock(-1), PoolBlock(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.before = self.fake_free_list_head
        self.count = 0

    def append(self, block: PoolBlock) -> None:
        tail = self.fake_free_list_tail
        last = tail.before
        assert last is not None
        last.next_free_block = tail.before = block
        block.before, block.next_free_block = last, tail
        self.count += 1

    def remove(self, block: PoolBlock) -> None:
        assert block.before is not None and block.next_free_block is not None, f"block {block.block_id} is not free"
        block.before.next_free_block, block.next_free_block.before = block.next_free_block, block.before
        block.before = block.next_free_block = None
        self.count -= 1

    def first(self) -> PoolBlock:
        block = self.fake_free_list_head.next_free_block
        assert block is not None and block is not self.fake_free_list_tail, "the pool is exhausted"
        return block


class Pool:
    """See the module. `caching`: whether blocks have names."""

    def __init__(self, blocks: int, caching: bool) -> None:
        self.num_gpu_blocks = blocks
        self.enable_caching = caching
        self.blocks = [PoolBlock(number) for number in range(blocks)]
        self.free_block_queue = _Queue()
        for block in self.blocks[1:]:
            self.free_block_queue.append(block)
        self._named: dict[bytes, dict[int, PoolBlock]] = {}
        self.cached_block_hash_to_block = SimpleNamespace(get_one_block=self._one)

    def _one(self, name: bytes) -> PoolBlock | None:
        return next(iter(self._named.get(name, {}).values()), None)

    def find(self, digests: Sequence[bytes]) -> list[PoolBlock]:
        """Leading blocks with these names."""
        found: list[PoolBlock] = []
        for digest in digests:
            block = self._one(digest + GROUP)
            if block is None:
                break
            found.append(block)
        return found

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.count

    def take(self, count: int) -> list[PoolBlock]:
        """Hand out free blocks, which lose their names. The caller has looked whether there are so many."""
        taken = []
        for _ in range(count):
            block = self.free_block_queue.first()
            self.free_block_queue.remove(block)
            self._unname(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[PoolBlock]) -> None:
        """One more refers to these."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[PoolBlock]) -> None:
        """One fewer refers to these; the first of those that are free now is handed out first."""
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is given back twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)

    def name(self, blocks: Sequence[PoolBlock], digests: Sequence[bytes]) -> None:
        """Name full blocks, of which some may have their names already."""
        for block, digest in zip(blocks, digests, strict=True):
            if block.block_hash is None:
                block.block_hash = digest + GROUP
                self._named.setdefault(block.block_hash, {})[block.block_id] = block

    def _unname(self, block: PoolBlock) -> None:
        if (name := block.block_hash) is not None:
            del self._named[name][block.block_id]
            if not self._named[name]:
                del self._named[name]
            block.block_hash = None

    def evict_blocks(self, numbers: Collection[int]) -> None:
        """Take the names of these away; whoever has them keeps them."""
        for number in sorted(numbers):
            self._unname(self.blocks[number])

    def reset_prefix_cache(self) -> bool:
        """Forget every name; False, and nothing is changed, where a block is not free."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        for block in self.blocks:
            self._unname(block)
        return True
