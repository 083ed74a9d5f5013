"""Blocks of prompts that a trace has as text: words and marks stand in for a tokenizer's tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvtier.bench.retention.trace import Names, Request

PROMPT_BLOCK_TOKENS = 16

_WORD = re.compile(r"\w{1,6}|[^\w\s]|\s+")


def tokens_of(text: str) -> list[str]:
    """Pieces of a text, about as many as a tokenizer would make. Pure."""
    return _WORD.findall(text)


def request_of(names: Names, at: float, tokens: Sequence[Any], output_tokens: int) -> Request:
    """The request of a prompt; its last block, where it is not full, has no name."""
    size = PROMPT_BLOCK_TOKENS
    full = [tuple(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size)]
    return Request(at, names.chain(full), len(tokens), output_tokens)
