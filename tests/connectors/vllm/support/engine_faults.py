"""What goes wrong in an engine on demand: a part of engine_host.Host, in the engine's process."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.cost_line import Bound

_CALLS = ("arrive", "match", "allocated", "plan", "completed", "finish")
"""What the engine's every request and step call in the scheduler half."""


class Faults:
    """Breaks the connector's two halves (`half`, `worker`) and the tiers (`cache`), and mends them."""

    llm: Any
    core: Any
    half: Any
    worker: Any
    cache: Any
    _faults: dict[str, Any]
    _struck = 0

    def break_loads(self, how: str, positions: list[int] | None = None, layers: str = "") -> None:
        """`zeros`: loads bring zeros (at these positions, in layers whose name has this in it) and say they succeeded;
        `fail`: the given positions of the next load fail;
        `always`: those of every load fail;
        `hang`: loads are not answered until `mend`;
        `now and then`: every third fails at one position, every fifth is made three steps late."""
        worker = self.worker
        if how == "zeros":
            plain = worker.load

            def zeros(loads: Any) -> None:
                plain(loads)
                worker.poll()
                tensors = worker._described.memory.owners
                names = self.connector._cache_layout.layers
                assert len(names) == len(tensors) or not layers
                for job in loads:
                    for tensor in (one for one, name in zip(tensors, names, strict=False) if layers in name):
                        for place in range(len(job.moves.blocks)) if positions is None else positions:
                            tensor[job.moves.blocks[place]].zero_()

            worker.load = zeros
        elif how in ("fail", "always"):
            submit = worker._submit

            def fail(job: Any) -> Any:
                ticket, moves = submit(job), job.moves
                if job.request and "used" not in self._faults:
                    if how == "fail":
                        self._faults["used"] = True
                    failed = {p for p in positions or [0] if p < len(moves.blocks)}
                    worker._failed[moves.job] = failed
                    worker.poll()
                    for tensor in worker._described.memory.owners:
                        for position in failed:
                            tensor[moves.blocks[position]].fill_(7.0)
                return ticket

            self._faults.pop("used", None)
            worker._submit = fail
        elif how == "now and then":
            submit, count = worker._submit, 0

            def now_and_then(job: Any) -> Any:
                nonlocal count
                ticket, moves = submit(job), job.moves
                if not job.request:
                    return ticket
                count += 1
                if count % 3 == 0:
                    worker._failed.setdefault(moves.job, set()).add(count % len(moves.blocks))
                    worker.poll()
                    for tensor in worker._described.memory.owners:
                        tensor[moves.blocks[count % len(moves.blocks)]].fill_(7.0)
                return ticket

            plain_load, begun = worker.load, 0

            def late(loads: Any) -> None:
                nonlocal begun
                waiting = self._faults.setdefault("late", [])
                due = [job for turns, job in waiting if turns <= 1]
                self._faults["late"] = [(turns - 1, job) for turns, job in waiting if turns > 1]
                for job in loads:
                    begun += 1
                    if begun % 5 == 0 and not job.in_step:  # a forward waits for the others
                        self._faults["late"].append((3, job))
                    else:
                        due.append(job)
                plain_load(due)

            worker._submit, worker.load = now_and_then, late
        elif how == "hang":
            held: list[Any] = []
            self._faults["held"] = held
            worker.load = held.extend
        else:
            raise ValueError(how)

    def hold_stores(self) -> None:
        """Copies out are neither made nor answered until `mend`."""
        held: list[Any] = []
        self._faults["stores"] = held
        self.worker.store = held.extend

    def hold_copies(self) -> None:
        """Copies are begun in both directions and not made until `mend`, or until their arena is given up."""
        self.worker.poll = lambda: None

    def stall_copies(self) -> None:
        """The device begins no copy, until `mend`."""
        self.worker._engine._launch_ready = lambda: None

    def go_away_in_step(self, name: str) -> None:
        """A client goes away while the step runs that makes the next loads: its engine learns of it before it takes the
        step's answers."""
        worker, plain = self.worker, self.worker.load
        whole = next(key for key in self.core.scheduler.requests if key.startswith(f"{name}-"))

        def load(loads: Any) -> None:
            plain(loads)
            if loads:
                self.llm.llm_engine.output_processor.abort_requests([whole], internal=True)
                self.core.aborts_queue.put_nowait([whole])
                worker.__dict__.pop("load", None)

        worker.load = load

    def wait_at_most(self, seconds: float) -> None:
        """How long a forward waits for its loads."""
        from kvtier.connectors.vllm import worker

        worker._IN_STEP_S = seconds

    def forget_weights(self) -> None:
        """As after weights were loaded in place by means that nobody saw: of another epoch, and without a name."""
        watch = self.worker._watch
        watch.epoch, watch.weights = watch.epoch + 1, ""

    def lose_arena(self) -> None:
        """The worker cannot reach the arena, whose descriptor is told to it anew, until `find_arena`."""
        worker = self.worker

        def lost(handle: Any) -> None:
            raise OSError("injected")

        worker._attach, worker._reached, self.half._arenas._told = lost, 0, 0

    def find_arena(self) -> None:
        """It is reachable again, and time for another try."""
        self.worker.__dict__.pop("_attach", None)
        self.half._arenas._tell_again_s = 0.0

    def break_once(self, owner: str, call: str) -> None:
        """One call of `half` or of a part of it raises, the next time."""
        part = self.half if owner == "half" else getattr(self.half, owner)
        plain = getattr(part, call)

        def broken(*args: Any, **kwargs: Any) -> Any:
            part.__dict__.pop(call, None)
            if getattr(part, call) != plain:
                setattr(part, call, plain)
            raise RuntimeError("injected")

        setattr(part, call, broken)

    def spoil(self, name: str, positions: list[int]) -> None:
        """Blocks of a running request get another content, and the next step reports it, as a load inside the step
        would that fails."""
        track = self._track(name)
        bad = [track.table[position] for position in positions]
        for tensor in self.worker._described.memory.owners:
            for block in bad:
                tensor[block].fill_(7.0)
        self.worker._bad_blocks.update(bad)

    def spoil_if_placed(self, name: str, positions: list[int]) -> bool:
        """`spoil` for a request that runs and has computed or loaded these blocks."""
        track = next((v.track for key, v in self.half._requests.items() if key.startswith(f"{name}-")), None)
        running = {request.request_id for request in self.core.scheduler.running}
        if track is None or track.name not in running or max(positions) * 32 >= track.trusted:
            return False
        self.spoil(name=f"{name}-", positions=positions)
        return True

    def second_rank(self, present: bool) -> None:
        """The scheduler half waits for answers of two ranks; the second one is `answer_of_second_rank`."""
        self.half._loads.ranks = self.half._stores.ranks = 2 if present else 1

    def answer_of_second_rank(self, failed: int = -1) -> int:
        """It has finished every copy out; the one at position `failed` of each job went wrong."""
        jobs = list(self.half._stores._storing)
        for job in jobs:
            self.half._stores.answer(job, 1, {failed} if failed >= 0 else set())
        return len(jobs)

    def offload(self, mode: str) -> None:
        """When blocks are copied out: the setting `offload.mode`."""
        stores = self.half._stores
        stores._offload = stores._offload.model_copy(update={"mode": mode})

    def limit(self, **limits: Any) -> None:
        half, changed = self.half, replace(self.half._limits, **limits)
        half._limits = half._stores.limits = half._launched._limits = changed
        half._loads.ack_timeout_s = changed.ack_timeout_s

    def resume_offload(self) -> None:
        self.half._stores.stopped = False

    def break_scheduler(self) -> None:
        """Every call into the scheduler half raises."""

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("injected")

        for name in _CALLS:
            setattr(self.half, name, broken)

    def mend(self) -> None:
        for name in ("load", "_submit", "poll"):
            self.worker.__dict__.pop(name, None)
        if self.worker._engine is not None:
            self.worker._engine.__dict__.pop("_launch_ready", None)
        for name in _CALLS:
            self.half.__dict__.pop(name, None)
        held = self._faults.pop("held", []) + [job for _, job in self._faults.pop("late", [])]
        if held:
            self.worker.load(held)
        self.worker.__dict__.pop("store", None)
        stores = self._faults.pop("stores", [])
        if stores:
            self.worker.store(stores)

    def doze(self) -> None:
        """What sleeping does, as far as a CPU can: nothing runs, caches are cleared, the tensors lose their content."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.core.pause_scheduler(mode="abort", clear_cache=True)
        get_kv_transfer_group().unregister_kv_caches()
        for tensor in self.worker._described.memory.owners:
            tensor.fill_(7.0)

    def wake(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().restore_kv_caches()
        self.core.resume_scheduler()

    def keep_on_reset(self, keep: bool) -> None:
        rotation = self.half._caches
        rotation.follow(rotation.config.model_copy(update={"keep_on_reset": keep}))

    def open_anew(self) -> bool:
        """Whether the cache that follows new weights is open; waits a while for it."""
        deadline = time.monotonic() + 20
        while not self.half._caches.join(0.1) and time.monotonic() < deadline:
            pass
        return self.cache is not None

    def strike_process(self, number: int, every: float, seconds: float = 0.0) -> None:
        """The process that works for G3 gets a signal again and again, and SIGCONT `seconds` later, until
        `spare_process`."""
        spared, tier = threading.Event(), self.cache.manager.lower["g3"]
        while not hasattr(tier, "_worker"):
            tier = tier.inner
        self._faults["spared"] = spared

        def strike() -> None:
            while not spared.wait(every):
                worker = tier._worker
                if worker is None:
                    continue
                self._struck += 1
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)
                    if seconds:
                        spared.wait(seconds)
                        os.kill(worker.process.pid, signal.SIGCONT)

        self._faults["striking"] = ThreadPoolExecutor(1, "strike").submit(strike)

    def struck(self) -> int:
        """How often."""
        return self._struck

    def spare_process(self) -> None:
        self._faults.pop("spared").set()
        self._faults.pop("striking").result(30)  # what ended it before is an error of the test

    def sicken(self, tier: str, how: str) -> None:
        """`error`, `hang` or `` (healthy again): every call into a lower tier from now on."""
        from kvtier.testing import Fault, FaultyTier

        guard = self.cache.manager.lower[tier].inner
        while not isinstance(guard.inner, FaultyTier) and hasattr(guard.inner, "inner"):
            guard = guard.inner
        if not isinstance(guard.inner, FaultyTier):
            guard.inner = FaultyTier(guard.inner)
        calls = {"error": ("*",), "hang": ("read", "write", "flush", "lookup"), "": ()}[how]
        guard.inner.faults = [Fault(call, how) for call in calls]

    def corrupt(self, folder: str) -> int:
        """Flip a byte in every 4 KiB of every file that holds payload. Returns how many files."""
        files = [p for p in Path(folder).rglob("*") if p.is_file() and p.stat().st_size >= 1 << 16]
        files = [p for p in files if p.suffix not in (".mdb", ".lock")]
        for path in files:
            with path.open("r+b") as file:
                for start in range(4096, min(path.stat().st_size, 64 << 20), 4096):
                    file.seek(start + 17)
                    byte = file.read(1)
                    file.seek(start + 17)
                    file.write(bytes([byte[0] ^ 0xFF]))
        return len(files)

    def pretend(self, tier: str, seconds_per_block: float | None) -> None:
        """What a lower tier's reads are taken to cost; None: what they do cost, and nothing is weighed against it."""
        metered = self.cache.manager.lower[tier]
        metered.__dict__.pop("estimate", None)
        if seconds_per_block is None:
            self.cache.manager.promoter._compute_s_per_block = None
        else:
            metered.estimate = lambda: Bound(0.0, seconds_per_block)
