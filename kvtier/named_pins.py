"""Named pins as the public surface shows them: `cache.pins`.

cache.pins.create("docs/manual", keys, "24h")      cache.pins.list()
cache.pins.extend("docs/manual", "7d")             cache.pins.delete("docs/manual")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.manager.protection import Protection
from kvtier.manager.slices import aside
from kvtier.retention.pins import Pin, check_name
from kvtier.times import Wall
from kvtier.units import parse_duration

TTL_S_MAX = 10 * 365 * 86_400.0
TOKENS_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A named pin. Times in seconds since the epoch; `resident` blocks of it are in host RAM now."""

    name: str
    created: Wall
    until: Wall
    blocks: int
    tokens: int
    bytes: int
    resident: int


class AsyncNamedPins:
    """Prefixes that stay until a time, by name: create, extend, delete, list. On the cache's event loop.

    Pinned blocks are neither evicted nor expired, in RAM, on the local disk and in object storage, as far as they are
    there or come to be there; pins outlive the process where a tier does. `ttl` is in seconds, or a
    duration such as "24h".
    """

    def __init__(
        self, protection: Protection, chain: Callable[[Sequence[bytes]], list[BlockKey]], block_tokens: int
    ) -> None:
        """`chain` checks keys, and that the cache is open."""
        self._protection = protection
        self._chain = chain
        self._block_tokens = block_tokens

    async def create(self, name: str, keys: Sequence[bytes], ttl: float | str, *, tokens: int | None = None) -> PinInfo:
        """Pin a chain. `tokens`: how many it stands for, where that is not all of its blocks'. Raises InvalidRequest if
        the name is malformed or taken, or more would be pinned than may be (`retention.reserved`)."""
        if tokens is not None and not (type(tokens) is int and 0 <= tokens <= TOKENS_MAX):
            raise InvalidRequest(f"tokens must be a number of tokens, got {tokens!r}")
        self._protection.require_loop()
        work = self._protection.begin()
        chain = await aside(len(keys), lambda: self._chain(keys))
        given = len(chain) * self._block_tokens if tokens is None else tokens
        pin = await self._protection.create(name, chain, seconds(ttl), given, work)
        return await aside(len(chain), lambda: self._info(pin))

    async def extend(self, name: str, ttl: float | str) -> PinInfo:
        """Let a pin end that long from now: later, or sooner. Raises InvalidRequest if there is none."""
        self._protection.require_loop()
        self._chain(())
        check_name(name)
        pin = await self._protection.extend(name, seconds(ttl))
        return await aside(len(pin.chain), lambda: self._info(pin))

    async def delete(self, name: str, *, drop: bool = False) -> bool:
        """End a pin; whether there was one. Its blocks may leave from now on; with `drop`, those that nothing else
        keeps leave every tier at once. Raises InvalidRequest for what cannot be a name."""
        self._protection.require_loop()
        self._chain(())
        check_name(name)
        return await self._protection.delete(name, drop=drop)

    async def list(self) -> list[PinInfo]:
        """The pins that have not ended, by name. Others have their turn between two of them."""
        self._protection.require_loop()
        self._chain(())
        found = []
        for pin in self._protection.listed():
            found.append(await aside(len(pin.chain), partial(self._info, pin)))
            await asyncio.sleep(0)
        return found

    def _info(self, pin: Pin) -> PinInfo:
        blocks = len(pin.chain)
        size = blocks * self._protection.block_bytes
        return PinInfo(pin.name, pin.created, pin.until, blocks, pin.tokens, size, self._protection.resident(pin))


class NamedPins:
    """`AsyncNamedPins` for threads: the same verbs, waiting."""

    def __init__(self, pins: AsyncNamedPins, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._pins = pins
        self._run = run

    def create(self, name: str, keys: Sequence[bytes], ttl: float | str, *, tokens: int | None = None) -> PinInfo:
        """See `AsyncNamedPins.create`."""
        info: PinInfo = self._run(self._pins.create(name, keys, ttl, tokens=tokens))
        return info

    def extend(self, name: str, ttl: float | str) -> PinInfo:
        """See `AsyncNamedPins.extend`."""
        info: PinInfo = self._run(self._pins.extend(name, ttl))
        return info

    def delete(self, name: str, *, drop: bool = False) -> bool:
        """See `AsyncNamedPins.delete`."""
        return bool(self._run(self._pins.delete(name, drop=drop)))

    def list(self) -> list[PinInfo]:
        """See `AsyncNamedPins.list`."""
        infos: list[PinInfo] = self._run(self._pins.list())
        return infos


def seconds(ttl: float | str) -> float:
    """A pin's time to live. Raises InvalidRequest."""
    value = parse_duration(ttl) if isinstance(ttl, str) else ttl
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= TTL_S_MAX:
        raise InvalidRequest(f"a pin's ttl lies above 0 and at most 10 years, got {ttl!r}")
    return float(value)
