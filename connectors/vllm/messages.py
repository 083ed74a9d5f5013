"""Messages between vLLM's scheduler process and its workers, once per step.

All of it is plain data that pickles: numbers, bytes, tuples. Memory never travels; workers map the arena themselves.
`kvtier.connectors.vllm.connector` registers the messages as vLLM's own, so that they need no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIXED = -1
"""The epoch of ranks that are not in one: no block belongs to it."""


def adapters_of_all(ours: Mapping[int, str], others: Mapping[int, str]) -> dict[int, str]:
    """Names of adapters by id over several ranks; "" for one that is not the same on all."""
    return {
        **ours,
        **{number: name if ours.get(number, name) == name else "" for number, name in others.items()},
    }


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """How another process of this host finds the arena: slot i of rank r lies at i × slot_bytes of memfd r.

    `files` are (fd of the process `pid`, inode) in rank order; the inode tells a recycled descriptor apart.
    """

    number: int
    pid: int
    files: tuple[tuple[int, int], ...]
    slots: int
    slot_bytes: int
    piece_bytes: int
    copy_by: str = "auto"  # how workers on GPUs copy
    calibration: str = ""  # folder of what was measured of that; "": measure anew


@dataclass(frozen=True, slots=True)
class StepMoves:
    """Copies of one job: block ↔ (slot, generation), position by position. `groups`: the overlay that each block is
    of (`CacheLayout.overlays`); empty where all are of the layers that are copied."""

    job: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A request's blocks that are to be filled. The request waits until every rank has answered; with `in_step` it is
    computed in the same step, whose forward waits. The blocks are of the adapter (id, name) `adapter`."""

    request: str
    moves: StepMoves
    adapter: tuple[int, str] | None = None
    in_step: bool = False


@dataclass
class StepMeta:
    """Scheduler → workers. Loads and stores are of weights epoch `epoch`."""

    step: int
    epoch: int = 0
    arena: ArenaHandle | None = None  # given once per arena, and again where a rank cannot reach it
    loads: list[Load] = field(default_factory=list)
    stores: list[StepMoves] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)  # finished requests whose blocks the engine may take back
    cancelled: list[int] = field(default_factory=list)  # loads that took too long: to be answered as failed


@dataclass
class WorkerMeta:
    """Workers → scheduler: the step that has run, and per job how many ranks are done and which moves failed.

    Jobs are done only when all ranks have reported them; the scheduler counts. `weights` names what the worker computes
    with in `epoch` ("": unknown); `adapters` are all it has loaded, by id, where that changed ("": of no certain
    content).
    """

    step: int
    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, set[int]] = field(default_factory=dict)  # job → positions in its moves
    unreached: int = 0  # number of the arena that a rank cannot reach; 0: none
    epoch: int = 0
    weights: str = ""
    adapters: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: WorkerMeta) -> WorkerMeta:
        done = dict(self.done)
        for job, ranks in other.done.items():
            done[job] = done.get(job, 0) + ranks
        failed = {job: set(positions) for job, positions in self.failed.items()}
        for job, positions in other.failed.items():
            failed.setdefault(job, set()).update(positions)
        epoch = self.epoch if self.epoch == other.epoch else MIXED
        weights = self.weights if self.weights == other.weights else ""
        adapters = adapters_of_all(self.adapters, other.adapters)
        unreached = max(self.unreached, other.unreached)
        # A step has run when all ranks have run it: those of later pipeline stages come last.
        return WorkerMeta(min(self.step, other.step), done, failed, unreached, epoch, weights, adapters)


@dataclass
class Handshake:
    """A worker → scheduler, once at start: what a block looks like on this rank, and where the rank runs."""

    layout: str
    dtype: str
    piece_bytes: int
    host: str
    pid: int = 0
    cpus: frozenset[int] = frozenset()  # beside the rank's GPU; none: unknown
    refusal: str = ""  # why these tensors cannot be served; "" if they can
    epoch: int = 0
    weights: str = ""  # name of the checkpoint as it was read; "": it was not watched
    unwatched: tuple[str, ...] = ()  # changes of weights and adapters that this release has no hook for
    layers: tuple[str, ...] = ()  # of full attention, that the rank's stage has
    groups: str = ""  # name of the set of groups there; "" for one
    replicated: bool = False  # whether the rank shares its piece with its stage's others, which hold the same bytes
