"""Like engine_host, with several ranks: the scheduler in this process, each rank in one of its own. Two pipeline stages
unless the engine's options say otherwise."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine_host

from kvtier.tiers.host.slot import Slot


class StagesHost(engine_host.Host):
    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # again, since a fork has the environment of its test
        os.environ["OMP_NUM_THREADS"] = "1"
        options["engine"] = {
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "stage_worker.StageWorker",
            **options.get("engine", {}),
        }
        super().__init__(options)
        self._on_all("stage_ready")
        if options.get("mended"):
            self._on_all("stage_mend_kernels")
        self._keys: dict[int, list[str]] = {}  # of a job's moves
        self._loads: set[int] = set()
        self._stored: dict[str, list[str]] = {}  # a block's digests by key, rank by rank
        self._under_way = 0
        self._struck_last = 0  # the rank
        if options.get("config") is not None:
            self._watch()

    def _on_all(self, call: str, *arguments: Any) -> list[Any]:
        return list(self.llm.collective_rpc(call, args=arguments))

    def _watch(self) -> None:
        self._on_all("stage_watch")
        half, plain = self.half, self.half.plan

        def plan(output: Any) -> Any:
            meta, table = plain(output), self.cache.manager.host.index.table
            self._under_way = max(self._under_way, len(half._launched))
            for moves in [*meta.stores, *(load.moves for load in meta.loads)]:
                self._keys[moves.job] = [Slot(number, table).key.hex() for number in moves.slots]
            self._loads.update(load.moves.job for load in meta.loads)
            return meta

        half.plan = plan

    def steps_under_way(self) -> int:
        """How many steps were planned and had not ended, at most."""
        return self._under_way

    def know(self, stored: dict[str, list[str]]) -> None:
        """What an earlier engine had stored."""
        self._stored = dict(stored)

    def compared(self) -> dict[str, Any]:
        """Compares what was copied since the last call: every block that was loaded on any rank with the one that was
        stored under its name there. `stored`: what is known by now."""
        ranks, layout = self._on_all("stage_watched"), self.connector._cache_layout
        share = layout.ranks // layout.pieces  # ranks of a piece, of which the first writes it
        stored, compared, wrong = 0, [0] * len(ranks), [0] * len(ranks)
        for job in sorted({job for seen in ranks for job in seen}):
            for place, key in enumerate(self._keys.get(job, ())):
                found = [seen.get(job, {}).get(place) for seen in ranks]
                if job not in self._loads:
                    found = [one or found[layout.piece_of(rank) * share] for rank, one in enumerate(found)]
                    if all(found):
                        stored += key not in self._stored
                        self._stored.setdefault(key, [str(one) for one in found])
                    continue
                for rank, digest in enumerate(found):
                    if digest is not None and key in self._stored:
                        compared[rank] += 1
                        wrong[rank] += digest != self._stored[key][rank]
        return {"stored": stored, "compared": compared, "wrong": wrong, "known": self._stored}

    def step_idle(self) -> None:
        """A step of an engine without requests."""
        self.core.step_fn()

    def processes(self) -> list[int]:
        return self._on_all("stage_process")

    def kill_rank(self, rank: int) -> None:
        os.kill(self.processes()[rank], signal.SIGKILL)

    def break_stage(self, rank: int, how: str, positions: list[int] | None = None) -> None:
        """See `StageWorker.stage_break_loads`."""
        self._on_all("stage_break_loads", rank, how, positions or [0])

    def hold_stores_of(self, rank: int) -> None:
        self._on_all("stage_hold_stores", rank)

    def mend(self) -> None:
        self._on_all("stage_mend")

    # As `Faults` has them in an engine of one rank; each strikes another rank than the one before.

    def _next_rank(self) -> int:
        self._struck_last = (self._struck_last + 1) % self.connector._cache_layout.ranks
        return self._struck_last

    def break_loads(self, how: str, positions: list[int] | None = None, layers: str = "") -> None:
        rank = self.connector._cache_layout.ranks if how == "now and then" else self._next_rank()
        self.break_stage(rank, how, positions)

    def hold_copies(self) -> None:
        self._on_all("stage_hold_copies", self._next_rank())

    def hold_stores(self) -> None:
        self.hold_stores_of(self._next_rank())

    def damage_piece(self, folder: str, prompt: list[int], depth: int, rank: int, group: str = "full") -> int:
        """Flip a byte on disk of one rank's piece of a prompt's block at a depth, or of the `last` block that groups
        beside the full one need behind it; it is in G2, too. Returns in how many places it was found."""
        chain = self._chain(prompt)
        key = chain[depth] if group == "full" else self.half._keys(chain, depth + 1)[-1]
        slot = self.cache.manager.host.index.get(key)
        sample, found = bytes(slot.pieces[rank][:64]), 0
        for path in Path(folder).rglob("*"):
            if not path.is_file() or path.suffix in (".mdb", ".lock") or path.stat().st_size < 1 << 16:
                continue
            content = path.read_bytes()
            place = content.find(sample)
            while place >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(place + 17)
                    file.write(bytes([content[place + 17] ^ 0xFF]))
                place = content.find(sample, place + 1)
        return found


if __name__ == "__main__":
    engine_host.main(StagesHost)
