"""The protocol of a tier below G2: G3, G4, wrappers and third parties.

A *chain* is a list of block keys from the first block of a prompt on: its index is the block's depth.
Every verb takes whole chains and batches, so that a tier can coalesce neighbours and find a block in the stride
of later ones. `kvtier.testing.check_tier` is this contract as a test suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.pins import Pin
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.times import Mono, Wall

if TYPE_CHECKING:
    from kvtier.supervisor import Service


class Miss(StrEnum):
    """Why a block could not be had from a tier. The value is the metric label."""

    ABSENT = "absent"  # not stored here
    EXPIRED = "expired"  # its terms ended
    EVICTED = "evicted"  # was here, and was evicted for other blocks
    QUOTA = "quota"  # its scope had no space left when it was stored
    SPILL_LOST = "spill_lost"  # the engine reused its memory before it was copied out
    PURGED = "purged"  # older than a tombstone of its scope
    PENDING = "pending"  # being written
    CORRUPT = "corrupt"  # failed its check; the entry was deleted
    RACED = "raced"  # another process replaced it between lookup and read
    FOREIGN = "foreign"  # another version's object, or another layout's, has its name; it is left alone
    UNKNOWN_KEY = "unknown_key"  # authenticated by a key that is not accepted here; it is left alone
    FORGED = "forged"  # its tag does not fit: damage or forgery; it is left alone
    MISMATCH = "mismatch"  # well-formed, but of another name, size or version
    UNPROVEN = "unproven"  # the purge log was not read lately (security.purge: strict)
    LATE = "late"  # not there within the deadline
    BREAKER = "breaker"  # the tier is taken out of use after errors
    ERROR = "error"  # the tier failed at this operation
    NO_KEY = "no_key"  # encrypted, and its tenant's key cannot be had: there is none, or it was destroyed
    WRONG_KEY = "wrong_key"  # encrypted with another key of its tenant
    NO_ROOM = "no_room"  # no upper slot to load it into
    SLOWER = "slower"  # loading would take longer than computing


class Stored(StrEnum):
    """The result of `write` for one block."""

    STORED = "stored"  # durable here now
    PRESENT = "present"  # was durable here already; its life is joined with the new one
    FULL = "full"  # nothing may be evicted for it
    REFUSED = "refused"  # by admission, ceiling or tombstone
    BUDGET = "budget"  # the tier has written what it may for now
    NO_KEY = "no_key"  # to be encrypted, and its tenant's key cannot be had
    FAILED = "failed"  # the tier failed; nothing of it is visible

    @property
    def durable(self) -> bool:
        return self in (Stored.STORED, Stored.PRESENT)


Pieces = tuple[memoryview, ...]
"""A block's bytes in RAM: one run of bytes per rank served, in rank order; together block_bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the block at `index` of a chain is to be read into. `into` is writable and the caller's; the tier
    writes to it only until `read` returns, and its content is undefined unless the result is Loaded."""

    index: int
    into: Pieces


@dataclass(frozen=True, slots=True)
class Loaded:
    """A block was read into its target and its digest matched."""

    digest: bytes
    life: Lifetime
    priority: int = PRIORITY


@dataclass(frozen=True, slots=True)
class Sealed:
    """A block to be written: key, depth in its chain, XXH3-128 over `pieces`, its life and priority.

    `pieces` is read-only and stays unchanged until `write` returns (the caller has it pinned). Where `parent` is
    given, a tier of single blocks takes the block only if the parent is there, or stored by the same write, and
    evicts it no later than the parent. `position`: number of the last entry of the replicas' purge log that was in
    force when the block was taken for writing (`kvtier.retention.marks`); 0: none.
    """

    key: BlockKey
    index: int
    digest: bytes
    pieces: Pieces
    life: Lifetime
    parent: BlockKey | None = None
    priority: int = PRIORITY
    position: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is. `capacity_bytes` 0: no bound of its own. `evictions`: blocks evicted since open.
    `written_bytes`: what the tier wrote to its device, in all its life; `stored_bytes`: the blocks among that;
    `budget_bytes`: what it may write per day, 0: no bound. `why_full`: what keeps it from growing into its capacity for
    now, and until when; empty where nothing does."""

    blocks: int
    bytes: int
    capacity_bytes: int = 0
    evictions: int = 0
    written_bytes: int = 0
    stored_bytes: int = 0
    budget_bytes: int = 0
    why_full: str = ""


class Tier(Protocol):
    """Blocks of one namespace outside RAM. Built closed; used between `open` and `close` on one event loop.

    Deadlines are absolute times of the injected clock's `monotonic`, in seconds. A verb that cannot
    meet its deadline returns LATE (or FAILED) and cleans up; it never returns while something still
    writes to a target or reads a sealed block. Tiers may raise TierError; the guard that wraps every tier
    (`kvtier.tiers.guard.Guarded`) turns that into misses. Cancellation is never swallowed.
    """

    name: str  # "g3", "g4"
    depth: Depth
    block_bytes: int
    stride: int  # blocks that `write` stores as one object, aligned in depth; 1 where blocks stand alone

    async def open(self) -> None:
        """Attach to the store, or create it. Raises FormatError, ConfigError or TierError. Raising or cancelled, it
        leaves nothing open."""

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        """For each depth in `wanted` (ascending): None if the block seems to be here, else why not. A read decides.

        Never waits for a device, a network or another process; LATE where one of them would have to be asked.
        Thread-safe.
        """

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        """Like `peek`, but may ask the device or the network. Stops asking at the first absent block."""

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        """Read and verify; one result per target. A block that fails its check is deleted."""

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        """Make blocks durable, each whole or not at all, in any order; one result per block.

        With `stride` > 1 the blocks are consecutive, of one chain, and start at a multiple of it.
        """

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        """Record that these blocks were used at `wall_s` in some tier, last key coldest. Keys that are not here are
        ignored. Batched: reaches the medium with a later write or flush."""

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        """Delete this tier's copies of `keys` (None: of the whole namespace). Returns how many it had."""

    async def purge(self, scope: Scope, before: Wall) -> int:
        """Delete the blocks of the scope's tenant (`kvtier.identity.keys.tenant_of`), all its variants, whose marks
        (`kvtier.retention.marks`) are at most `before`, or times from the future; for every process that shares the
        store they are misses from now on. Returns how many were deleted."""

    async def tombstones(self) -> Mapping[Scope, Wall]:
        """Every purge of this namespace that the store still remembers: tenant → latest `before`."""

    async def flush(self, deadline: Mono) -> None:
        """Write all that is buffered, touches included, to the medium."""

    def usage(self) -> Usage:
        """Blocks and bytes held for all namespaces in this store. Cheap; thread-safe."""

    def check(self) -> None:
        """Assert the tier's invariants. For tests and `Cache.check`; may read its whole index."""

    async def close(self, deadline: Mono) -> None:
        """Flush within the deadline and release all resources, whatever fails, and though it is cancelled. Idempotent;
        the tier may be opened again."""


class Supervised(Protocol):
    """Optional verbs of a tier with background work of its own, which it restarts when it fails."""

    def report_to(self, service: Service) -> None:
        """Tell `service`, on any thread, when a task keeps failing. Called before `open`."""

    def restarts(self) -> Mapping[str, int]:
        """How often each task failed and was restarted. Thread-safe."""


class PurgeLogging(Protocol):
    """The optional attribute `purge_log` of a shared tier whose purges are a log. Thread-safe; no I/O."""

    position: int
    """Number of the last entry that was read; `tombstones` returned those until then. 0: there is none."""

    read_at: Mono
    """When the last successful listing of the log began, by the injected clock; -inf before the first."""

    floor: int
    """What was written at a position below is purged, whosesoever it is: `tombstones` does not name it."""

    def hold(self, scope: Scope) -> None:
        """A purge of the scope's tenant is asked for: what it wrote until now counts as purged here, and the log holds
        the purge until it has an entry for it that was begun after this call."""

    def holds(self, scope: Scope) -> bool:
        """Whether a purge of the scope's tenant has no entry in the log yet."""

    def mark(self, scope: Scope) -> Wall:
        """The mark up to which the scope's tenant is purged by what was read of the log; -inf where it never was."""

    def remember(self, raw: bytes) -> int:
        """`memory` of an earlier process: the log must go on from there. Returns its position. Before `open`."""

    def memory(self) -> bytes:
        """How far the log was read, for `remember` in the next process."""


class Retaining(Protocol):
    """Optional verbs of a local tier: exempt blocks from eviction, over restarts and for every process that shares the
    store, and drop blocks that a wrong clock stamped. Raises TierError."""

    async def retain(self, keys: Sequence[BlockKey], until: Wall, served: Wall | None = None) -> list[bool]:
        """Do not evict these blocks before wall time `until`; serve them until `served`, whatever their terms. Replaces
        an earlier call for the same block. Per key: whether it is here, and so retained."""

    async def release_retained(self, keys: Sequence[BlockKey], untils: Sequence[Wall] | None = None) -> None:
        """Undo `retain`, of blocks that are retained no longer than these times say (None: however long): another
        process may want them beyond. Keys that are not retained are ignored."""

    async def retained(self) -> Mapping[BlockKey, Wall]:
        """The namespace's retained blocks, and until when."""

    async def drop_made_after(self, time: Wall) -> int:
        """Delete the namespace's blocks with a use or stamp later than this wall time: a wrong clock made it. Returns
        how many."""


class Resizable(Protocol):
    """Optional verb of a local tier: another capacity while it is in use. Raises TierError."""

    async def resize(self, capacity_bytes: int, write_budget: float) -> bool:
        """Hold up to so many bytes from now on, and write at most `write_budget` of them a day (0: any). False: not
        now, since other processes use the store; no block is lost then either."""


class Pinning(Protocol):
    """Optional verbs of a shared tier: named pins, for every replica. Raises TierError."""

    async def pin(self, pin: Pin) -> None:
        """Retain blocks of the pin's chain that are here, now or later, until it ends; replaces a pin of that name."""

    async def unpin(self, name: str, only: Pin | None = None) -> bool:
        """End a pin, `only` this one where it is given: another replica may have replaced it. Whether it was there."""

    async def pins(self) -> list[Pin]:
        """The pins that have not ended."""


class Notebook(Protocol):
    """Optional verbs of a local tier: store small values of the manager by name, per namespace. They are checked by
    their reader. Raises TierError."""

    async def write_note(self, name: str, value: bytes | None) -> None:
        """Durable when this returns; None deletes."""

    async def read_notes(self, prefix: str) -> Mapping[str, bytes]:
        """All notes whose names begin with `prefix`."""


CONTENT_BYTES_MAX, CONTENT_PART_BYTES = 16_360, 4
"""Of one page of contents, and what each of its parts takes beside its bytes."""


class Describing(Protocol):
    """Optional verbs of a local tier: keep what the namespace's blocks hold, as an engine describes it, in pages of at
    most CONTENT_BYTES_MAX. A page has parts, each of one tenant, whose 8 bytes it begins with. The newest pages are
    kept, as many as the tier's blocks need. A purge takes the tenant's parts out of all of them."""

    async def write_contents(
        self, number: int, parts: Sequence[bytes], purges: int
    ) -> tuple[int, int, list[bytes] | None]:
        """Write a page over page `number`, or a new one (0). Returns its number, and how many purges there were. Where
        those are more than `purges`, the number is 0, nothing is written, and what was described before is to be
        dropped, of the tenants that follow; None: of all. Without parts it only asks. (0, 0, None): contents cannot be
        kept now. A page survives the process, but perhaps not a loss of power."""

    async def read_contents(self, below: int) -> tuple[int, list[bytes]]:
        """The newest page with a number below this (0: any): its number and parts; (0, []) where there is none."""
