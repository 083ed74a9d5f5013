"""A cache in a forked child of the process that opened it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

import kvtier
from kvtier.testing import chain_of, payloads_of, sample_namespace

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}})

FORKED: dict[str, Callable[[kvtier.Cache, list[bytes]], object]] = {
    "match": lambda cache, keys: cache.match(keys),
    "get": lambda cache, keys: cache.get(keys),
    "put": lambda cache, keys: cache.put(keys, payloads_of(keys, BLOCK)),
    "flush": lambda cache, _: cache.flush(),
    "purge": lambda cache, _: cache.purge("tenant"),
    "pins": lambda cache, _: cache.pins.list(),
    "submit": lambda cache, keys: cache.submit(cache.manager.match(keys)).result(),
    "account": lambda cache, _: cache.account("request"),
    "stats": lambda cache, _: cache.stats(),
    "reload": lambda cache, _: cache.reload(CONFIG),
}


@pytest.mark.parametrize("verb", FORKED)
def test_a_forked_child_is_refused(verb: str) -> None:
    """At once, though another thread had the cache's lock when it was forked, and its loop does not run there."""
    with kvtier.open(CONFIG, NS) as cache:
        keys = list(chain_of(NS, 1))
        cache.put(keys, payloads_of(keys, BLOCK))
        with cache.manager.lock:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(5)  # ends it, where it hangs
                status = 1
                try:
                    FORKED[verb](cache, keys)
                except kvtier.ClosedError:
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.match(keys) == 1
