"""`kvtier pin create|extend|delete|list`: prefixes that are retained until a time, by name.

With a G4 in the configuration, pins are stored in its bucket, for every replica that shares it; otherwise in the G3
directory, for the processes that share that.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from kvtier.cache import chain_hashes
from kvtier.cache import open as open_cache
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.cli.stored import as_stored, cut_down, read_namespace
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.manager.build import lower_tiers
from kvtier.named_pins import PinInfo, seconds
from kvtier.retention.pins import Pin
from kvtier.tiers.objects.tier import ObjectTier

TOKENS_BYTES_MAX = 64 << 20
LOOKUP_S = 10.0

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG")]
Name = Annotated[str, typer.Argument(help="The pin's name: 1 … 128 of A-Z a-z 0-9 _ . : / -", metavar="NAME")]
Fields = Annotated[Path, typer.Option("--namespace", help="JSON file with the fields of the namespace.")]
Tokens = Annotated[
    Path, typer.Option("--tokens", help="The prompt: a file of token ids, as a JSON list or apart by blanks.")
]
Ttl = Annotated[str, typer.Option("--ttl", help="How long from now, such as 7d.")]
Salt = Annotated[str | None, typer.Option("--salt", help="The tenant's salt; default: requests without one.")]


def create(
    file: File, name: Name, namespace: Fields, tokens: Tokens, ttl: Ttl, salt: Salt = None, json: Json = False
) -> None:
    """Retain the blocks of a prompt under NAME for --ttl, those stored now and those stored later."""
    config, fields = Config.load(file), read_namespace(namespace)
    ids = read_tokens(tokens)
    chain = [BlockKey(key) for key in chain_hashes(ids, fields, salt, secret=config.scope_secret)]
    if not chain:
        raise InvalidRequest(f"{tokens} has {len(ids)} tokens, which is no whole block of {fields.block_tokens}")
    with _opened(config, fields) as pins:
        pin = pins.create(name, chain, ttl, tokens=len(ids))
        here = pins.match(chain)
    _report(pin, f"{here} of its {len(chain)} blocks are there now", json, resident_blocks=here)


def extend(file: File, name: Name, namespace: Fields, ttl: Ttl, json: Json = False) -> None:
    """Set a pin to end --ttl from now, later or sooner than before."""
    with _existing(file, namespace) as pins:
        pin = pins.extend(name, ttl)
    _report(pin, "extended", json)


def delete(file: File, name: Name, namespace: Fields, json: Json = False) -> None:
    """Delete a pin: its blocks live as long as their terms allow."""
    with _existing(file, namespace) as pins:
        there = pins.delete(name)
    if json:
        write_json({"name": name, "deleted": there})
    else:
        console().print(f"{name}: deleted" if there else f"{name}: there is no such pin")
    if not there:
        raise typer.Exit(1)


def listing(file: File, namespace: Fields, json: Json = False) -> None:
    """List all pins of a namespace."""
    with _existing(file, namespace) as pins:
        listed = pins.list()
    if json:
        write_json({"pins": [_shown(pin) for pin in listed]})
    else:
        rows = [[pin.name, pin.blocks, pin.tokens, _date(pin.created), _date(pin.until)] for pin in listed]
        write_table(["pin", "blocks", "tokens", "since", "until"], rows)


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file. Raises InvalidRequest naming it."""
    try:
        if path.stat().st_size > TOKENS_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {TOKENS_BYTES_MAX >> 20} MiB")
        text = path.read_text("utf-8")
        found = jsonlib.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except OSError as wrong:
        raise InvalidRequest(f"{path} cannot be read: {wrong.strerror}") from wrong
    except (ValueError, RecursionError) as wrong:
        raise InvalidRequest(f"{path} is no list of token ids: {wrong}") from wrong
    if not all(type(token) is int and 0 <= token < 2**32 for token in found):
        raise InvalidRequest(f"{path} has something that is no token id")
    return list(found)


class _PinStore(Protocol):
    """A tier that stores pins."""

    def create(self, name: str, keys: Sequence[BlockKey], ttl: str, *, tokens: int) -> PinInfo: ...
    def extend(self, name: str, ttl: str) -> PinInfo: ...
    def delete(self, name: str) -> bool: ...
    def list(self) -> list[PinInfo]: ...
    def match(self, keys: Sequence[BlockKey]) -> int: ...


def _existing(file: Path, namespace: Path) -> AbstractContextManager[_PinStore]:
    """The pins of a store that is there: a mistyped path creates none."""
    fields = read_namespace(namespace)
    return _opened(as_stored(Config.load(file), fields), fields)


@contextmanager
def _opened(config: Config, fields: Namespace) -> Iterator[_PinStore]:
    clock = SystemClock()
    bucket = next((tier for tier in lower_tiers(config, fields, clock) if isinstance(tier, ObjectTier)), None)
    if bucket is not None:
        with asyncio.Runner() as runner:
            runner.run(bucket.open())
            try:
                yield _BucketPins(bucket, runner, clock)
            finally:
                runner.run(bucket.close(clock.monotonic() + LOOKUP_S))
        return
    if config.tiers.g3 is None:
        raise ConfigError("neither tiers.g4 nor tiers.g3 is set: a pin needs a tier that outlives the process")
    with open_cache(cut_down(config, fields), fields) as cache:
        yield _DirectoryPins(cache)


class _DirectoryPins:
    """A G3 directory: a cache's own pins."""

    def __init__(self, cache: Any) -> None:
        self.create, self.extend = cache.pins.create, cache.pins.extend
        self.delete, self.list, self.match = cache.pins.delete, cache.pins.list, cache.match


class _BucketPins:
    """A bucket, without a cache around it."""

    def __init__(self, tier: ObjectTier, runner: asyncio.Runner, clock: SystemClock) -> None:
        self._tier, self._runner, self._clock = tier, runner, clock

    def create(self, name: str, keys: Sequence[BlockKey], ttl: str, *, tokens: int) -> PinInfo:
        if any(pin.name == name for pin in self._runner.run(self._tier.pins())):
            raise InvalidRequest(f"pin {name!r} exists already; extend it, or delete it first")
        now = self._clock.wall()
        return self._put(Pin(name, tuple(keys), now, now + seconds(ttl), tokens))

    def extend(self, name: str, ttl: str) -> PinInfo:
        until = self._clock.wall() + seconds(ttl)
        for pin in self._runner.run(self._tier.pins()):
            if pin.name == name:
                return self._put(replace(pin, until=until))
        raise InvalidRequest(f"pin {name[:40]!r} does not exist")

    def _put(self, pin: Pin) -> PinInfo:
        self._runner.run(self._tier.pin(pin))
        return self._info(pin)

    def delete(self, name: str) -> bool:
        return self._runner.run(self._tier.unpin(name))

    def list(self) -> list[PinInfo]:
        return [self._info(pin) for pin in self._runner.run(self._tier.pins())]

    def match(self, keys: Sequence[BlockKey]) -> int:
        found = self._runner.run(self._tier.lookup(keys, range(len(keys)), self._clock.monotonic() + LOOKUP_S))
        return next((depth for depth, miss in enumerate(found) if miss is not None), len(found))

    def _info(self, pin: Pin) -> PinInfo:
        blocks = len(pin.chain)
        return PinInfo(pin.name, pin.created, pin.until, blocks, pin.tokens, blocks * self._tier.block_bytes, 0)


def _report(pin: PinInfo, outcome: str, as_json: bool, **more: Any) -> None:
    if as_json:
        write_json(_shown(pin) | more)
    else:
        console().print(f"{pin.name}: {pin.blocks} blocks until {_date(pin.until)}; {outcome}")


def _shown(pin: PinInfo) -> dict[str, Any]:
    return {name: getattr(pin, name) for name in ("name", "blocks", "tokens", "bytes", "created", "until")}


def _date(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"
