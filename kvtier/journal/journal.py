"""Remembers the latest requests of one cache, prompts included, in bounded memory and for this process only.

It is off, and costs a comparison per request, unless somebody can ask: `trace.socket`. What a tenant's purge covers is
forgotten with it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.journal.served import Remembered, ServedRequest
from kvtier.manager.divergence import tails_of
from kvtier.supervisor import soon
from kvtier.times import Wall

REQUESTS_MAX = 1024
TOKENS_MAX = 4 << 20
"""Tokens of all remembered prompts, 4 bytes each; a prompt without known tokens counts those of its whole blocks."""

NAME_CHARS_MAX = 256
_PURGES_MAX = 4096


class Journal:
    """See the module. Thread-safe. Built closed."""

    def __init__(self, block_tokens: int, *, requests_max: int = REQUESTS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        self.block_tokens = block_tokens
        self.secret = secrets.token_bytes(16)
        """Under it prefixes have their short names: nobody can find a prompt by its name."""
        self._requests_max, self._tokens_max = requests_max, tokens_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._kept: deque[Remembered] = deque()
        self._tokens = 0
        self._purged: OrderedDict[Scope, Wall] = OrderedDict()  # tenant → time

    def open(self) -> None:
        """Remember, from now on, on the running loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def active(self) -> bool:
        """Whether requests are remembered."""
        return self._loop is not None

    def record(self, served: ServedRequest, prompt: Sequence[BlockKey], tokens: Sequence[int] = ()) -> None:
        """A request has ended. `prompt` names its whole blocks; neither that nor `tokens` changes any more. Does not
        wait."""
        if self._loop is not None:
            soon(self._loop, self._keep, served, prompt, tokens)

    def _keep(self, served: ServedRequest, prompt: Sequence[BlockKey], tokens: Sequence[int]) -> None:
        size = self._size(len(prompt), len(tokens))
        if not prompt or size > self._tokens_max:
            return
        served = replace(served, name=served.name[:NAME_CHARS_MAX])  # a client may choose it
        tails = tails_of(prompt)
        try:
            packed = array("I", tokens)
        except (TypeError, ValueError, OverflowError):  # no token ids of a vocabulary: nothing can be shown of them
            packed = array("I")
        with self._lock:
            if served.at_s <= self._purged.get(tenant_of(served.scope), -1.0):
                return
            self._kept.append(Remembered(served, tails, packed))
            self._tokens += size
            while len(self._kept) > self._requests_max or self._tokens > self._tokens_max:
                self._tokens -= self._size_of(self._kept.popleft())

    def _size(self, blocks: int, tokens: int) -> int:
        return max(blocks * self.block_tokens, tokens)

    def _size_of(self, one: Remembered) -> int:
        return self._size(len(one.tails) // 8, len(one.tokens))

    def purge(self, scopes: Mapping[Scope, Wall]) -> None:
        """Forget the requests of these scopes' tenants, and do not remember those that arrived until then and are under
        way. Takes a fraction of a millisecond."""
        before = {tenant_of(scope): until for scope, until in scopes.items()}
        with self._lock:
            for tenant, until in before.items():
                self._purged[tenant] = until
                self._purged.move_to_end(tenant)
            while len(self._purged) > _PURGES_MAX:
                self._purged.popitem(last=False)
            stays = [one for one in self._kept if tenant_of(one.served.scope) not in before]
            if len(stays) < len(self._kept):
                self._kept = deque(stays)
                self._tokens = sum(map(self._size_of, stays))

    def latest(self) -> list[Remembered]:
        """All that is remembered, oldest first by their end."""
        with self._lock:
            return list(self._kept)
