"""Real traces lie beside the checkout, in ../shared/traces, or where KVTIER_TRACES says. They are not shipped."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bench.retention.trace import Request, Trace
from kvtier.bench.retention.traces import load_trace


def _folder() -> Path:
    root = Path(__file__).parents[3]
    places = [Path(os.environ["KVTIER_TRACES"])] if "KVTIER_TRACES" in os.environ else []
    places += [parent / "shared" / "traces" for parent in root.parents]
    return next((place for place in places if place.is_dir()), places[0])


def _real(name: str) -> Trace:
    path = _folder() / name
    if not path.exists():
        pytest.skip(f"{name} is not at {path.parent}; set KVTIER_TRACES to a folder that has it")
    return load_trace(path)


@pytest.fixture(scope="session")
def mooncake() -> Trace:
    return _real("mooncake_conversation.jsonl")


@pytest.fixture(scope="session")
def claude() -> Trace:
    return _real("claude_code_24h.npz")


def _made(seed: int, requests: int = 300, users: int = 15) -> Trace:
    """Conversations that grow and branch."""
    rng = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    chats: list[tuple[int, ...]] = [() for _ in range(users)]
    out, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(0.1)
        user = rng.randrange(users)
        chat = chats[user][: rng.randrange(1, 60)] if rng.random() < 0.1 else chats[user]
        chat = (*chat, *(rng.randrange(10**6) for _ in range(rng.randrange(1, 7))))[:80]
        chats[user] = chat
        blocks = [names.setdefault(chat[: depth + 1], len(names)) for depth in range(len(chat))]
        out.append(Request(now, blocks, 16 * len(blocks), 10, user))
    return Trace(f"made-{seed}", "made", 16, tuple(out), len(names))


@pytest.fixture
def made() -> Callable[..., Trace]:
    return _made
