"""Shared by both faces of a cache: its manager, checks of arguments, and verbs that do not wait."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.config.changes import reloadable_changes
from kvtier.errors import ClosedError, ConfigError, InvalidRequest
from kvtier.hit import Hit
from kvtier.identity import hashing
from kvtier.identity.keys import BlockKey, Scope, check_keys, scope_of, scope_of_key
from kvtier.identity.namespace import Namespace
from kvtier.journal.journal import Journal
from kvtier.journal.served import ServedRequest
from kvtier.log_lines import set_log_lines
from kvtier.manager.accounts import Account
from kvtier.manager.build import build, limits_of
from kvtier.manager.lease import Lease
from kvtier.manager.work import Work
from kvtier.named_pins import AsyncNamedPins
from kvtier.put import Put
from kvtier.request_trace import RequestTrace
from kvtier.retention.ranges import ChainTerms, RequestTerms, Wanted, request_terms
from kvtier.spans import set_spans
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

TIMEOUT_S_MAX = 365 * 86_400.0
"""As good as no end: the waits of threads take no infinite time, nor one of centuries."""

RELOAD_S = 10.0
"""How long a reload waits for one that began before, whose file may lie on a server that does not answer."""


class Face:
    """Shared by both faces: configuration, checks of arguments, and the pid that opened them."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        clock: Clock,
        lower: Sequence[Tier] | None = None,
        near: Sequence[Collection[int]] = (),
        computes: bool = False,
    ) -> None:
        self.config = self._opened = config
        self.source: Path | None = None
        """The YAML file that `kvtier reload` has it read; None: there is none, or it is not to be read."""
        self.on_reload: Callable[[Config], object] | None = None
        """Told of each configuration that was taken over."""
        self.namespace = namespace
        self._clock = clock
        self._retention = config.terms(), config.retention.default
        self._secret = config.scope_secret
        self._pid = os.getpid()
        set_log_lines(config.log.level, config.log.format)
        set_spans(config.trace.spans)
        self._reloading = threading.Lock()
        self._starting = False
        self.manager = build(config, namespace, clock, lower, near, computes)
        self.journal = Journal(namespace.block_tokens)
        self.trace = RequestTrace(
            config.trace.socket, namespace.block_tokens, clock, namespace.fields(), answer=self._answer
        )
        self._pins = AsyncNamedPins(
            self.manager.protection, lambda keys: self._chain(keys, distinct=True), namespace.block_tokens
        )

    async def _start(self) -> None:
        if self._starting or not self.manager.closed:
            raise InvalidRequest("this cache is open already; each `async with` needs one of its own")
        self._starting = True
        try:
            await self.manager.start()
        finally:
            self._starting = False
        if self.config.trace.socket is not None:
            self.journal.open()
            self.manager.hierarchy.work.watch(self.journal)
        self.trace.open(self.manager.hierarchy.supervisor)

    def _answer(self, line: bytes) -> dict[str, Any]:
        """The answer to a question that was asked at the trace socket."""
        from kvtier.journal.answers import Answers  # brings NumPy, and a question is rare

        return Answers(self.journal, self._clock.wall, self._block_s, self._reload_source).to(line)

    def _reload_source(self, asked: object) -> dict[str, Any]:
        if (source := self.source) is None:
            raise ConfigError("this cache was opened with no YAML file that it could read anew; restart it")
        if not isinstance(asked, str | None):
            raise InvalidRequest("file: a path, or null for the file that the cache was opened with")
        if asked is not None and os.path.realpath(asked) != os.path.realpath(source):
            raise InvalidRequest(
                f"this cache was opened with {source}, not with {asked}; nothing was changed. Give that file, or "
                "the trace.socket where the file has another path for you, as with a container"
            )
        return {"file": str(source), "changed": self.reload(source)}

    def _block_s(self) -> float | None:
        costs = self.manager.promoter.costs()
        return None if costs is None else costs.compute_s

    def _require_process(self) -> None:
        """Raises ClosedError in a forked child, where no lock is to be taken: another thread of the parent may have had
        it, and the loop runs there only."""
        if os.getpid() != self._pid:
            raise ClosedError("this cache was opened in another process; open one of your own after a fork")

    def _chain(self, keys: Sequence[bytes], *, distinct: bool) -> list[BlockKey]:
        self._require_process()
        if self.manager.closed:
            raise ClosedError("the cache is closed")
        chain = list(keys)  # first: the caller's may change meanwhile
        check_keys(chain, distinct=distinct)
        return cast("list[BlockKey]", chain)

    def _wanted(self, keys: Sequence[bytes], start: int, *requests: object, distinct: bool = False) -> list[BlockKey]:
        """`requests`: ids of some, as callers give them."""
        chain = self._chain(keys, distinct=distinct)
        for each in requests:
            if not isinstance(each, str):
                raise InvalidRequest(f"a request's id must be a string, got {type(each).__name__}")
        if not hasattr(start, "__index__") or not 0 <= start <= len(chain):
            raise InvalidRequest(f"start must lie in 0 … {len(chain)}, got {start!r}")
        return chain

    def _put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        retention: Wanted,
        *,
        start: int,
        wait: bool,
        request_id: str,
        work: Work,
    ) -> Put:
        chain = self._wanted(keys, start, request_id, distinct=True)
        terms = ChainTerms(self._terms(retention), self.namespace.block_tokens)
        return Put(self.manager, chain, buffers, terms, start=start, wait=wait, request_id=request_id, work=work)

    def _hit(self, lease: Lease, chain: Sequence[BlockKey], start: int, request_id: str, compared_with: str) -> Hit:
        tokens = len(chain) * self.namespace.block_tokens
        self.trace.record(chain, tokens)
        if self.journal.active and chain:
            given = Counter(g1=start) + Counter(lease.tiers)
            read = {tier: blocks * self.namespace.block_tokens for tier, blocks in given.items()}
            scope, why = scope_of_key(chain[0]), str(lease.miss or "")
            self.journal.record(ServedRequest(request_id, scope, self._clock.wall(), tokens, 0, read, why), chain)
        return Hit(lease, self.manager.count(lease, len(chain) - start, request_id, compared_with, chain))

    def _terms(self, retention: Wanted) -> RequestTerms:
        return request_terms(retention, *self._retention)

    def _deadline(self, timeout: float | None, default: float) -> Mono:
        if timeout is not None and not (isinstance(timeout, Real) and timeout >= 0):
            raise InvalidRequest(f"timeout must be at least 0 seconds, got {timeout!r}")
        return self._clock.monotonic() + (default if timeout is None else min(timeout, TIMEOUT_S_MAX))

    def chain_hashes(self, tokens: Any, salt: str | bytes | None = None, retention: Wanted = None) -> list[bytes]:
        """Keys of `tokens` in this cache's namespace, under its scope secret; in a scope of its own if `retention`
        names an isolated class, so that other classes neither find its blocks nor carry them to disk. Pure."""
        scope = scope_of(salt, isolated=self._terms(retention).isolated, secret=self._secret)
        return keys_of_tokens(tokens, self.namespace, scope)

    async def _purge(self, salt: str | bytes | None) -> int:
        # All scopes of the tenant go; keys may have been made without the secret (`kvtier.chain_hashes`).
        return await self.manager.purge({scope_of(salt, secret=secret) for secret in (self._secret, b"")})

    def _tier_name(self, tier: str) -> str:
        names = (self.manager.host.name, *self.manager.lower)
        if tier not in names:
            raise InvalidRequest(f"{tier!r} is not a tier of this cache; it has {', '.join(names)}")
        return tier

    def account(self, request_id: str) -> Account | None:
        """In tokens, what a request asked for, read by tier, missed by reason and wrote by retention class. None: it is
        not among the latest thousand."""
        self._require_process()
        return self.manager.account(request_id)

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of a prompt in this time: blocks that load slower are not loaded."""
        if not (0 < tokens < float("inf") and 0 <= seconds < float("inf")):
            raise InvalidRequest(f"tokens and seconds must be positive, got {tokens} and {seconds}")
        self.manager.computed(tokens / self.namespace.block_tokens, seconds)

    def reload(self, config: Config | str | Path) -> list[str]:
        """Take over what another configuration, or the YAML file, changes among
        `kvtier.config.changes.RELOADABLE`, from the next call on (capacities: within seconds), without losing a block
        that has a place. Returns the keys that changed. Raises ConfigError, also for a change that needs a restart, and
        ClosedError; then nothing was changed. Thread-safe, one after the other: to wait longer than RELOAD_S for
        another is a ConfigError. Not to be called from a signal handler (`reload_on_sighup`)."""
        self._require_process()
        if not self._reloading.acquire(timeout=RELOAD_S):  # the file that was read last is the one in force
            raise ConfigError(f"another reload has not read its file for {RELOAD_S:.0f} s; nothing was changed")
        try:
            self._chain((), distinct=False)
            config = config_of(config)
            changed = reloadable_changes(self.config, config, self._opened)
            self.manager.host.arena.slots_in(config.tiers.g2.capacity)  # raises
            limits, retention = limits_of(config, self.namespace), (config.terms(), config.retention.default)
            set_spans(config.trace.spans)  # the last that may raise
            self.manager.apply(limits)
            self.config, self._retention = config, retention
            set_log_lines(config.log.level, config.log.format)
            if self.on_reload is not None:
                self.on_reload(config)
        finally:
            self._reloading.release()
        log.info("configuration reloaded: %s", ", ".join(changed) or "nothing changed")
        return changed

    def stats(self) -> dict[str, Any]:
        """Per tier: blocks, bytes, capacity, hits, misses by reason, evictions, latency; and `requests`. Of a closed
        cache, the last ones. Raises ClosedError in a forked child."""
        self._require_process()
        return self.manager.stats()

    def check(self) -> None:
        """Assert the invariants of every tier. Reads whole indexes: for tests and after incidents."""
        self._require_process()
        self.manager.check()


def config_of(config: object) -> Config:
    """A configuration as it is, or read from the file of that path. Raises ConfigError."""
    if isinstance(config, str | Path):
        return Config.load(config)
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a kvtier.Config or the path of a YAML file, got {type(config).__name__}; a mapping goes "
            "through Config.parse"
        )
    return config


def file_of(config: object) -> Path | None:
    """The file, where `config_of` reads one, wherever the process goes later."""
    return Path(config).absolute() if isinstance(config, str | Path) else None


def keys_of_tokens(tokens: Any, namespace: Namespace, scope: Scope) -> list[bytes]:
    """One key (scope ‖ hash) per full block of `tokens`, head first. Pure."""
    root = hashing.chain_root(namespace.digest, scope)
    return [scope + digest for digest in hashing.chain_hashes(root, tokens, namespace.block_tokens)]
