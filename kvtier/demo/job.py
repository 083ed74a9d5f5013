"""The job of one process of the demo, and its report of a turn: values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIERS = ("g1", "g2", "g3", "g4")


@dataclass(frozen=True, slots=True)
class Job:
    """`folder` holds G3, the reference and the prompts; `g4` is a URL with a prefix of its own.

    The first process follows the script; the second repeats the last turns (`resume`). `real`: the model can chat, and
    its answers end where it ends them.
    """

    folder: str
    g4: str
    g4_options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    real: bool = False
    resume: bool = False
    conversations: int = 4
    turns: int = 4
    new_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the tiers that served its prompt, in tokens, and in blocks by KV group; times to the first token;
    results of the comparisons.

    `tokens_same`: as after an in-memory hit at the same boundary. `gap`: 0.0 if also as after a full prefill, else the
    gap of the two best logits where they part. `question` and `answer` are text.
    """

    conversation: str
    prompt_tokens: int
    served: dict[str, int]
    ttft_hit_ms: float
    ttft_recompute_ms: float
    blocks_restored: int
    bytes_same: bool
    tokens_same: bool
    gap: float
    question: str = ""
    answer: str = ""
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
