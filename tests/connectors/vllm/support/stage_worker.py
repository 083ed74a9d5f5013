"""What tests do inside of each worker of an engine with several ranks: vLLM mixes this into its worker's class."""

from __future__ import annotations

from hashlib import sha256
from typing import Any


class StageWorker:
    """Every call runs on all ranks, between steps. `rank` is the worker's."""

    rank: int
    model_runner: Any

    @property
    def _stage_half(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def stage_ready(self) -> None:
        """What a warm-up does, which vLLM leaves out on CPUs without compilation: the memory for what comes from the
        stage before. Its first step raises an AssertionError without."""
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def stage_mend_kernels(self) -> None:
        """What vLLM's kernels of Mamba 2 lack on CPUs."""
        from mended_kernels import mend_mamba2

        mend_mamba2()

    def stage_process(self) -> int:
        import os

        return os.getpid()

    def stage_watch(self) -> None:
        """From now on remember the bytes of every block that is copied, by job and place. Those that no layer of its
        group has are clear where it comes back."""
        import torch

        half, seen = self._stage_half, {}
        plain, self._stage_seen = half._finish, seen

        def content(block: int, group: int | None) -> str:
            pages = (tensor[block].contiguous().view(-1).view(torch.uint8) for tensor in half._described.memory.owners)
            whole = bytearray(b"".join(page.numpy().tobytes() for page in pages))
            for offset, count in () if group is None else half._described.absent[group]:
                whole[offset : offset + count] = bytes(count)
            return sha256(whole).hexdigest()

        def finish(job: Any) -> None:
            bad = half._failed.get(job.moves.job, set())
            groups = job.moves.groups or [None] * len(job.moves.blocks)
            each = enumerate(zip(job.moves.blocks, groups, strict=True))
            seen[job.moves.job] = {place: content(*one) for place, one in each if place not in bad}
            plain(job)

        half._finish = finish

    def stage_watched(self) -> dict[int, dict[int, str]]:
        """What was copied since the last call."""
        seen = dict(self._stage_seen)
        self._stage_seen.clear()
        return seen

    def stage_break_loads(self, rank: int, how: str, positions: list[int]) -> None:
        """On one rank: `zeros`: loads bring zeros and say that they succeeded; `fail`: these positions of every load
        fail; `hang`: loads are neither made nor answered; `late`: they are made three steps late. `now and then`: every
        third load fails at one position on one of `rank` ranks in turn, and some are late. Until `mend`."""
        half = self._stage_half
        if how == "now and then":
            self._stage_strike(rank)
            return
        if self.rank != rank:
            return
        if how == "fail":
            submit = half._submit

            def fail(job: Any) -> Any:
                ticket, count = submit(job), len(job.moves.blocks)
                if job.request:
                    self._stage_fail(job, {place % count for place in positions if -count <= place < count})
                return ticket

            half._submit = fail
            return
        if how == "zeros":
            finish = self._stage_finish = half._finish

            def zeros(job: Any) -> None:
                for tensor in half._described.memory.owners if job.request else ():
                    for block in job.moves.blocks:
                        tensor[block].zero_()
                finish(job)

            half._finish = zeros
            return
        plain, self._stage_held = half.load, []

        def late(loads: Any) -> None:
            due = [job for turns, job in self._stage_held if turns <= 1]
            self._stage_held = [(turns - 1, job) for turns, job in self._stage_held if turns > 1]
            self._stage_held += [(3, job) for job in loads]
            plain(due)

        def hang(loads: Any) -> None:
            self._stage_held += [(0, job) for job in loads]

        half.load = {"late": late, "hang": hang}[how]

    def _stage_fail(self, job: Any, failed: set[int]) -> None:
        """These positions of a load that was submitted."""
        half, moves = self._stage_half, job.moves
        half._failed.setdefault(moves.job, set()).update(failed)
        half.poll()
        for tensor in half._described.memory.owners:
            for place in failed:
                tensor[moves.blocks[place]].fill_(7.0)

    def _stage_strike(self, ranks: int) -> None:
        half = self._stage_half
        submit, load, begun, made = half._submit, half.load, 0, 0
        self._stage_held = []

        def now_and_then(job: Any) -> Any:
            nonlocal made
            ticket = submit(job)
            if job.request:
                made += 1
                if made % (3 * ranks) == 3 * self.rank:
                    self._stage_fail(job, {made % len(job.moves.blocks)})
            return ticket

        def late(loads: Any) -> None:
            nonlocal begun
            due = [job for turns, job in self._stage_held if turns <= 1]
            self._stage_held = [(turns - 1, job) for turns, job in self._stage_held if turns > 1]
            for job in loads:
                begun += 1
                if begun % (3 * ranks + 1) == self.rank:
                    self._stage_held.append((3, job))
                else:
                    due.append(job)
            load(due)

        half._submit, half.load = now_and_then, late

    def stage_hold_copies(self, rank: int) -> None:
        """Copies of one rank are begun in both directions and not made until `mend`."""
        if self.rank == rank:
            self._stage_half.poll = lambda: None

    def stage_hold_stores(self, rank: int) -> None:
        """Copies out of one rank are neither made nor answered until `mend`."""
        if self.rank == rank:
            self._stage_stores: list[Any] = []
            self._stage_half.store = self._stage_stores.extend

    def stage_mend(self) -> None:
        half = self._stage_half
        for name in ("load", "_submit", "store", "poll"):
            half.__dict__.pop(name, None)
        if (finish := vars(self).pop("_stage_finish", None)) is not None:
            half._finish = finish
        held, stores = vars(self).pop("_stage_held", []), vars(self).pop("_stage_stores", [])
        half.load([job for _, job in held])
        half.store(stores)
