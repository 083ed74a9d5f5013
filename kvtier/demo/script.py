"""The demo's conversations, shipped beside this file, and the order of their turns in both processes. There are those
for a random model, and those that a small real one can answer.

The order makes every tier serve. Conversations open with two turns, so that the second finds the first in G1; all
continue once; then they continue in reverse, so that each has been idle for longer than the one before and lies in a
deeper tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from kvtier.errors import FormatError


@dataclass(frozen=True, slots=True)
class Conversation:
    """A name and the user's turns."""

    name: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """The text before every conversation, and the conversations."""

    system: str
    conversations: tuple[Conversation, ...]


def read(*, real: bool = False) -> Script:
    """The script in the package; `real`: the one that a small real model can answer. Reads one file."""
    name = "real_conversations.txt" if real else "conversations.txt"
    return parse(files("kvtier.demo").joinpath(name).read_text(encoding="utf-8"))


def parse(text: str) -> Script:
    """Sections `== name`, paragraphs between blank lines; the first section is `== system`. Raises FormatError."""
    sections = []
    for part in text.split("== ")[1:]:
        name, _, body = part.partition("\n")
        turns = tuple(" ".join(paragraph.split()) for paragraph in body.split("\n\n") if paragraph.strip())
        sections.append(Conversation(name.strip(), turns))
    if not sections or sections[0].name != "system" or len(sections) < 2 or not all(s.turns for s in sections):
        raise FormatError("a script begins with '== system' and has a conversation after it, each with its paragraphs")
    return Script(" ".join(sections[0].turns), tuple(sections[1:]))


def order(conversations: int, turns: int) -> list[int]:
    """The conversation of each turn of the first process; each conversation comes `turns` times. Pure."""
    everyone = range(conversations)
    out = [number for number in everyone for _ in range(min(2, turns))]
    for turn in range(2, turns):
        out += everyone if turn % 2 == 0 else reversed(everyone)
    return out


def shortened(script: Script, conversations: int, turns: int) -> Script:
    """The first `conversations` of it, `turns` turns each. Pure."""
    kept: Sequence[Conversation] = script.conversations[:conversations]
    return Script(script.system, tuple(Conversation(c.name, c.turns[:turns]) for c in kept))
