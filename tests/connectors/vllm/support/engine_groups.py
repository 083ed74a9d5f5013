"""The blocks of an engine with several KV groups: a part of engine_host.Host, in the engine's process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from engine_insides import Insides

from kvtier.tiers.host.slot import Slot


class GroupsOfEngine(Insides):
    """Looks at single blocks of the pool and of the tiers, by group."""

    _watched: dict[str, Any]

    def watch_bytes(self) -> None:
        """From now on compare every block that is loaded with the one that was stored under its name. What its
        group's layers do not use of it is to be clear; `blank` counts such runs."""
        import torch

        worker, plain = self.worker, self.worker._finish
        seen: dict[Any, bytes] = {}
        counts = self._watched = {"stored": 0, "compared": 0, "wrong": 0, "windows": 0, "blank": 0}

        def content(block: int, group: int | None = None) -> bytes:
            owners = worker._described.memory.owners
            pages = [tensor[block].contiguous().view(-1).view(torch.uint8).numpy() for tensor in owners]
            whole = bytearray(b"".join(page.tobytes() for page in pages))
            for offset, count in () if group is None else worker._described.absent[group]:
                whole[offset : offset + count] = bytes(count)
                counts["blank"] += 1
            return hashlib.sha256(whole).digest()

        def finish(job: Any) -> None:
            moves, request = job.moves, job.request
            bad = worker._failed.get(moves.job, set())
            table = self.cache.manager.host.index.table
            for place, (block, number, generation) in enumerate(
                zip(moves.blocks, moves.slots, moves.generations, strict=True)
            ):
                slot = Slot(number, table)
                if place in bad or slot.generation != generation:
                    continue
                if request:
                    counts["compared"] += 1
                    counts["wrong"] += seen.get(slot.key, content(block)) != content(block)
                else:
                    found = content(block, moves.groups[place] if moves.groups else None)
                    counts["stored"] += seen.setdefault(slot.key, found) is not None
            if request:
                counts["windows"] += len(moves.blocks) - len(set(moves.blocks) & set(self._full_blocks(request)))
            plain(job)

        worker._finish = finish

    def _full_blocks(self, name: str) -> list[int]:
        manager = self.core.scheduler.kv_cache_manager
        return list(manager.get_block_ids(name)[self.half._group])

    def bytes_watched(self) -> dict[str, Any]:
        return self._watched

    def groups(self) -> list[list[Any]]:
        """Kind, block tokens and layers of each of the engine's groups."""
        groups = self.core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        return [
            [type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, len(group.layer_names)]
            for group in groups
        ]

    def boundaries(self, prompt: list[int]) -> list[int]:
        """Depths of a prompt whose windows' blocks are all in G2."""
        chain, manager = self._chain(prompt), self.cache.manager
        found = ((depth, self.half._keys(chain, depth)) for depth in range(1, len(chain) + 1))
        return [depth for depth, keys in found if manager.prefix(keys) == len(keys)]

    def drop(self, prompt: list[int], depth: int, group: str) -> int:
        """Evict from every tier the windows' blocks at a depth of a prompt (`windows`: all, `last`: the last of them),
        or the chain's block there (`full`). Returns how many copies there were."""
        chain = self._chain(prompt)
        keys = {"full": [chain[depth - 1]], "windows": self.half._keys(chain, depth)}.get(group)
        keys = self.half._keys(chain, depth)[-1:] if keys is None else keys
        manager = self.cache.manager
        dropped = sum(manager.host.drop_where(lambda number: manager.host.index.table.keys[number] in set(keys)))
        for tier in manager.lower.values():
            dropped += self.cache.submit(tier.evict(keys)).result(20)
        return dropped

    def damage(self, folder: str, prompt: list[int], depth: int, group: str) -> int:
        """Flip a byte on disk of one block, which is in G2: as for `drop`, the last one of its group. Returns in how
        many places its bytes were found."""
        chain = self._chain(prompt)
        key = chain[depth - 1] if group == "full" else self.half._keys(chain, depth)[-1]
        slot = self.cache.manager.host.index.get(key)
        sample = bytes(slot.pieces[0][:64])
        found = 0
        for path in Path(folder).rglob("*"):
            if path.is_file() and path.suffix not in (".mdb", ".lock") and path.stat().st_size >= 1 << 16:
                content = path.read_bytes()
                place = content.find(sample)
                while place >= 0:
                    found += 1
                    with path.open("r+b") as file:
                        file.seek(place + 17)
                        file.write(bytes([content[place + 17] ^ 0xFF]))
                    place = content.find(sample, place + 64)
        return found

    def held(self) -> int:
        """Blocks of windows that kvtier holds in the engine's pool."""
        return int(self.half._held.count)
