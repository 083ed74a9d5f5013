"""Every key does something: code outside the configuration reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.config import Config
from kvtier.config.explain import known_keys

ROOT = Path(__file__).parents[2]
SOURCES = "\n".join(
    path.read_text()
    for folder in ("kvtier", "connectors")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != ROOT / "kvtier/config/schema.py" and "cli" not in path.parts
)
ELSEWHERE = {
    "version": "checked by the configuration itself",
    "retention.classes.*": "handed on as Terms",
}


@pytest.mark.parametrize("key", known_keys(Config))
def test_a_key_is_read(key: str) -> None:
    if any(key == known or key.startswith(f"{known}.") for known in ELSEWHERE):
        return
    section, _, leaf = key.rpartition(".")
    # A word of two parts is nobody else's; a common one must stand behind its section.
    owner = r"\w+" if "_" in leaf else re.escape(section.rpartition(".")[2] or "config")
    assert re.search(rf"\b{owner}\.{leaf}\b", SOURCES)
