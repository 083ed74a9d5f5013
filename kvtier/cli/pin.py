"""`kvtier pin create|extend|delete|list`: prefixes that every replica of a bucket keeps until a time, by name."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvtier.block import BlockKey
from kvtier.cache import chain_hashes, lower_tiers
from kvtier.cli.doctor import read_namespace
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.clock import Clock, SystemClock
from kvtier.config import Config
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.namespace import Namespace
from kvtier.pins import Pin
from kvtier.terms import parse_duration
from kvtier.tiers.objects import ObjectTier

T = TypeVar("T")
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
    """Keep the blocks of a prompt under NAME for --ttl, for every replica that shares the bucket."""
    config, fields = Config.load(file), read_namespace(namespace)
    ids = read_tokens(tokens)
    chain = tuple(BlockKey(key) for key in chain_hashes(ids, fields, salt, secret=config.scope_secret))
    if not chain:
        raise InvalidRequest(f"{tokens} has {len(ids)} tokens, which is no whole block of {fields.block_tokens}")

    async def work(tier: ObjectTier, clock: Clock) -> tuple[Pin, int]:
        if any(pin.name == name for pin in await tier.pins()):
            raise InvalidRequest(f"pin {name!r} exists already; extend it, or delete it first")
        pin = Pin(name, chain, clock.wall(), clock.wall() + _seconds(ttl), len(ids))
        await tier.pin(pin)
        found = await tier.lookup(pin.chain, range(len(pin.chain)), clock.monotonic() + LOOKUP_S)
        return pin, next((depth for depth, miss in enumerate(found) if miss is not None), len(found))

    pin, here = _on_bucket(config, fields, work)
    _tell(pin, f"{here} of its {len(chain)} blocks are in the bucket now", json, resident_blocks=here)


def extend(file: File, name: Name, namespace: Fields, ttl: Ttl, json: Json = False) -> None:
    """Let a pin end --ttl from now: later than it would, or sooner."""

    async def work(tier: ObjectTier, clock: Clock) -> Pin:
        for pin in await tier.pins():
            if pin.name == name:
                longer = replace(pin, until=clock.wall() + _seconds(ttl))
                await tier.pin(longer)
                return longer
        raise InvalidRequest(f"there is no pin {name[:40]!r}")

    _tell(_on_bucket(Config.load(file), read_namespace(namespace), work), "extended", json)


def delete(file: File, name: Name, namespace: Fields, json: Json = False) -> None:
    """End a pin: from now on its blocks live as long as their terms say."""
    there = _on_bucket(Config.load(file), read_namespace(namespace), lambda tier, clock: tier.unpin(name))
    if json:
        write_json({"name": name, "deleted": there})
    else:
        console().print(f"{name}: deleted" if there else f"{name}: there is no such pin")
    if not there:
        raise typer.Exit(1)


def listing(file: File, namespace: Fields, json: Json = False) -> None:
    """Show all pins of a namespace."""
    pins = _on_bucket(Config.load(file), read_namespace(namespace), lambda tier, clock: tier.pins())
    if json:
        write_json({"pins": [_shown(pin) for pin in pins]})
    else:
        rows = [[pin.name, len(pin.chain), pin.tokens, _date(pin.created), _date(pin.until)] for pin in pins]
        write_table(["pin", "blocks", "tokens", "since", "until"], rows)


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file. Raises InvalidRequest naming it."""
    try:
        if path.stat().st_size > TOKENS_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {TOKENS_BYTES_MAX >> 20} MiB")
        text = path.read_text("utf-8")
        found = jsonlib.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (OSError, ValueError, RecursionError) as wrong:
        raise InvalidRequest(f"{path} is no list of token ids: {wrong}") from wrong
    if not all(type(token) is int and 0 <= token < 2**32 for token in found):
        raise InvalidRequest(f"{path} has something that is no token id")
    return list(found)


def _seconds(ttl: str) -> float:
    seconds = parse_duration(ttl)
    if seconds <= 0:
        raise InvalidRequest(f"--ttl {ttl}: write a time above 0, such as 7d")
    return seconds


def _on_bucket(config: Config, fields: Namespace, work: Callable[[ObjectTier, Clock], Awaitable[T]]) -> T:
    """`work` on the bucket that the configuration names, opened and closed."""
    clock = SystemClock()
    tier = next((tier for tier in lower_tiers(config, fields, clock) if isinstance(tier, ObjectTier)), None)
    if tier is None:
        raise ConfigError("tiers.g4 is not set: pins are kept in the bucket that replicas share")

    async def run() -> T:
        await tier.open()
        try:
            return await work(tier, clock)
        finally:
            await tier.close(clock.monotonic() + LOOKUP_S)

    return asyncio.run(run())


def _tell(pin: Pin, what: str, as_json: bool, **more: Any) -> None:
    if as_json:
        write_json(_shown(pin) | more)
    else:
        console().print(f"{pin.name}: {len(pin.chain)} blocks until {_date(pin.until)}; {what}")


def _shown(pin: Pin) -> dict[str, Any]:
    return {
        "name": pin.name,
        "blocks": len(pin.chain),
        "tokens": pin.tokens,
        "created": pin.created,
        "until": pin.until,
    }


def _date(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"
