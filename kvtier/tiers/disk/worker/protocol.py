"""Messages between a cache and its G3 worker process: frames over a socket pair.

    length (u32, little-endian) ‖ one message in msgpack

    cache → worker    Call (a verb of the tier, and the cache's time), Cancel
    worker → cache    Answer or Refusal per call; Removed, by writes; LogLine

Bytes of blocks never travel: both sides have the arena mapped, and an ArenaSpan names a piece of it. Deadlines travel
as seconds left, since each side has its own monotonic clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.trusted_clock import Reading
from kvtier.tiers.disk.worker.shared_arena import ArenaSpan
from kvtier.tiers.protocol import Describing, Loaded, Miss, Notebook, Resizable, Retaining, Stored, Tier, Usage

FRAME_BYTES_MAX = 1 << 30
"""Seventeen million keys of retained blocks with their times."""
_LENGTH_BYTES = 4


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first call's argument: which tier to open. Fields as in `kvtier.tiers.disk.tier.DiskTier`."""

    paths: list[str]
    capacity: int
    namespace: dict[str, Any]
    quota: float
    write_budget: float
    encrypted: bool = False


class GivenKey(msgspec.Struct, array_like=True, frozen=True):
    """A tenant's data key, for one call: the worker reads no key itself. Without a secret: why there is none."""

    scope: Scope
    secret: bytes
    created: float
    miss: Miss = Miss.NO_KEY

    def __repr__(self) -> str:
        return f"GivenKey({self.scope.hex()})"


class Block(msgspec.Struct, array_like=True, frozen=True):
    """`kvtier.tiers.protocol.Sealed` with spans for pieces."""

    key: BlockKey
    index: int
    digest: bytes
    spans: list[ArenaSpan]
    life: Lifetime
    parent: BlockKey | None
    priority: int
    position: int


class Call(msgspec.Struct, array_like=True, tag="call", frozen=True):
    number: int
    verb: str
    time: Reading
    arguments: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """A call's caller was cancelled. The call is answered all the same, once nothing of it is under way."""

    number: int


class Answer(msgspec.Struct, array_like=True, tag="answer", frozen=True):
    """`usage` and `counters` are the tier's after the call; None while they are not known. `restarts`: of its threads,
    since it began."""

    number: int
    result: msgspec.Raw
    usage: Usage | None
    counters: dict[str, int] | None = None
    restarts: dict[str, int] = {}


class Refusal(msgspec.Struct, array_like=True, tag="refusal", frozen=True):
    """A call that raised: the error's class in `kvtier.errors`, and its text; `operation` of a TierError."""

    number: int
    error: str
    text: str
    operation: str = ""


class Removed(msgspec.Struct, array_like=True, tag="removed", frozen=True):
    keys: list[BlockKey]


class Outage(msgspec.Struct, array_like=True, tag="outage", frozen=True):
    """A thread of the tier keeps failing."""

    reason: str


class LogLine(msgspec.Struct, array_like=True, tag="log", frozen=True):
    level: int
    text: str


WorkerRequest = Call | Cancel
Reply = Answer | Refusal | Removed | Outage | LogLine


class Verb(NamedTuple):
    """Decoders of a verb's arguments (a tuple) and of its result."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


_OWN: Mapping[str, tuple[Any, Any]] = {
    "open": (tuple[WorkerSetup], None),
    "lookup": (tuple[list[BlockKey], list[GivenKey], float], list[Miss | None]),
    "read": (tuple[list[BlockKey], list[list[ArenaSpan]], list[GivenKey], float], list[Loaded | Miss]),
    "write": (tuple[list[Block], list[GivenKey], float], list[Stored]),
    "flush": (tuple[float], None),
    "close": (tuple[float], None),
}
"""Verbs whose arguments differ from the tier's: the last float is the time left, in seconds; keys are those wanted."""

_SAME = (
    (Tier, ("touch", "evict", "purge", "tombstones")),
    (Retaining, ("retain", "release_retained", "retained", "drop_made_after")),
    (Notebook, ("write_note", "read_notes")),
    (Describing, ("write_contents", "read_contents")),
    (Resizable, ("resize",)),
)


@cache
def verbs() -> Mapping[str, Verb]:
    """All verbs that travel."""
    types = dict(_OWN)
    for protocol, names in _SAME:
        for name in names:
            hints = get_type_hints(getattr(protocol, name))
            result = hints.pop("return")
            types[name] = (tuple[tuple(hints.values())], result)  # type: ignore[misc]
    decoder = msgspec.msgpack.Decoder
    return {name: Verb(decoder(arguments), decoder(result)) for name, (arguments, result) in types.items()}


def frame(message: WorkerRequest | Reply) -> bytes:
    """A message as it travels. Raises TierError for one that is too long: at its other end it would be taken for
    garbage, and end the process. Pure."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise TierError("g3", "process", f"a message of {len(body)} bytes is too long")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def packed(value: object) -> msgspec.Raw:
    """Arguments or a result, inside a message. Pure."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


async def next_body(reader: asyncio.StreamReader) -> bytes:
    """The next message, undecoded. Raises EOFError or OSError at the stream's end, and for an impossible length."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > FRAME_BYTES_MAX:
        raise OSError(f"a message of {length} bytes")
    return await reader.readexactly(length)


requests: msgspec.msgpack.Decoder[WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
