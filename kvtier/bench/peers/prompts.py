"""Prompts of a contest: conversations of a trace as token ids, and a small model that answers them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from kvtier.bench.retention.trace import Trace
from kvtier.bench.retention.traces import load_trace

BLOCK_TOKENS = 32
PROMPT_BLOCKS_MAX = 64
BLOCK_BYTES = 65_536
"""Of the small model below: 4 layers × K and V × 2 heads × 32 numbers × 4 bytes × 32 tokens."""


def conversations(trace: Trace, requests: int, seed: int) -> list[list[int]]:
    """About `requests` requests of `trace` as lists of block ids: whole conversations drawn at random, in order of
    time. A conversation is what shares its first two blocks; the first alone many have as their system prompt. Pure."""
    rng = random.Random(seed)
    by_root: dict[tuple[int, ...], int] = {}
    for request in trace.requests:
        by_root.setdefault(tuple(request.blocks[:2]), len(by_root))
    order = list(range(len(by_root)))
    rng.shuffle(order)
    sizes = [0] * len(by_root)
    for request in trace.requests:
        sizes[by_root[tuple(request.blocks[:2])]] += 1
    kept: set[int] = set()
    count = 0
    for root in order:
        if count >= requests:
            break
        kept.add(root)
        count += sizes[root]
    return [list(r.blocks) for r in trace.requests if by_root[tuple(r.blocks[:2])] in kept]


def prompts_of(blocks: Sequence[Sequence[int]], vocabulary: int = 1000) -> list[list[int]]:
    """Token ids: every block id stands for the same run of tokens, wherever it comes; one more token at the end,
    since the last one of a prompt is computed in any case. Pure."""
    out = []
    for chain in blocks:
        tokens: list[int] = []
        for block in chain[:PROMPT_BLOCKS_MAX]:
            rng = random.Random(block)
            tokens += [rng.randrange(3, vocabulary) for _ in range(BLOCK_TOKENS)]
        out.append([*tokens, 5])
    return out


def sample() -> list[list[int]]:
    """The slice that comes with kvtier: 120 requests of the Mooncake conversation trace (FAST'25, Apache-2.0)."""
    return _packaged("conversation_slice.jsonl")


def agents() -> list[list[int]]:
    """The slice that comes with kvtier: the first 10 requests of 12 coding agents, which begin at once
    (kv-cache-tester, Apache-2.0)."""
    return _packaged("agent_slice.jsonl")


def _packaged(name: str) -> list[list[int]]:
    file = resources.files("kvtier.bench.peers") / name
    return [json.loads(line)["hash_ids"] for line in file.read_text().splitlines()]


def slice_of(trace: Path | None, requests: int, seed: int) -> list[list[int]]:
    """The packaged slice, or one of `trace`. Raises InvalidRequest."""
    if trace is None:
        return sample()[:requests]
    return conversations(load_trace(trace), requests, seed)[:requests]


def reusable(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Per request, how many leading blocks an endless cache would have of earlier ones. Pure."""
    seen: set[int] = set()
    out = []
    for chain in (list(chain[:PROMPT_BLOCKS_MAX]) for chain in blocks):
        out.append(next((i for i, block in enumerate(chain) if block not in seen), len(chain)))
        seen.update(chain)
    return out


def make_model(folder: Path) -> Path:
    """A small random Llama whose output depends on all of its prompt: with weights as narrow as usual greedy decoding
    runs into a short cycle whatever the KV holds, and wrong bytes would go unnoticed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)
    return folder
