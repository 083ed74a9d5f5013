"""What the workers compute with, known to the scheduler under vLLM's own offloading, which does not ask.

Every step tells the workers the epoch of the weights and the adapters that its loads are of, and its number. A load of
others is reported as failed, so its request computes; every answer names the epoch and the adapters that the worker
has, and the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvtier.connectors.vllm.messages import MIXED, adapters_of_all
from kvtier.connectors.vllm.weights import AdapterClaims, WeightsWatch


@dataclass
class OffloadingStep(OffloadingConnectorMetadata):
    """Scheduler → workers: vLLM's jobs of a step, the epoch that they are of, and adapters (id, name) by request."""

    step: int = 0
    epoch: int = 0
    adapters: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass
class OffloadingAnswer(OffloadingWorkerMetadata):
    """Workers → scheduler: vLLM's answers, what the worker computes with, and requests whose loads were refused.

    `step`: this one and all before it have run.
    """

    step: int = 0
    epoch: int = 0
    weights: str = ""
    adapters: dict[int, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingAnswer:
        assert isinstance(other, OffloadingAnswer)
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        return OffloadingAnswer(
            both.completed_jobs,
            both.transfer_stats,
            min(self.step, other.step),
            self.epoch if self.epoch == other.epoch else MIXED,
            self.weights if self.weights == other.weights else "",
            adapters_of_all(self.adapters, other.adapters),
            self.refused | other.refused,
        )


@dataclass(slots=True)
class _Loading:
    epoch: int
    blocks: tuple[int, ...]
    adapter: tuple[int, str] | None


class LoadGuard:
    """Of one worker: tells which loaded blocks are of other weights than it computes with."""

    def __init__(self, watch: WeightsWatch) -> None:
        self._watch = watch
        self._claims = AdapterClaims(watch)
        self._loading: dict[str, _Loading] = {}  # by request; each has one load at a time
        self._bad: set[int] = set()
        self._refused: set[str] = set()
        self._step = 0

    def start(self, step: OffloadingStep) -> None:
        """A step begins, and its loads."""
        self._step = step.step
        for job in step.load_jobs.values():
            blocks: Any = job.dst_spec
            places = tuple(int(block) for block in blocks.block_ids)
            self._loading[job.req_id] = _Loading(step.epoch, places, step.adapters.get(job.req_id))

    def ended(self, requests: set[str]) -> None:
        """The loads of these requests have ended on this rank."""
        for name in requests:
            load = self._loading.pop(name, None)
            if load is None:
                continue
            right = load.adapter is None or self._claims.right(*load.adapter, load.blocks)
            if load.epoch != self._watch.epoch or not right:
                self._bad.update(load.blocks)
                self._refused.add(name)

    def bad_blocks(self) -> set[int]:
        """Blocks that hold what other weights computed, since the last call."""
        bad, self._bad = self._bad | self._claims.settle(), set()
        return bad

    def answer(self, meta: OffloadingWorkerMetadata | None) -> OffloadingAnswer:
        """vLLM's answer of a step with what this worker computes with."""
        meta = meta or OffloadingWorkerMetadata()
        refused, self._refused = self._refused, set()
        watch = self._watch
        return OffloadingAnswer(
            meta.completed_jobs,
            meta.transfer_stats,
            self._step,
            watch.epoch,
            watch.weights,
            dict(watch.adapters),
            refused,
        )
