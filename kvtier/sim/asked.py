"""A request of a virtual engine, with what the connector reads of vLLM's, and all that it will be made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey
from kvtier.sim.ledger import Before
from kvtier.sim.pool import PoolBlock
from kvtier.sim.prompts import NAMESPACE, SALTS, kind_of, text_of

SIZE = NAMESPACE.block_tokens
_AHEAD = 3
"""Tokens beyond its last that steps may be planned for before that one is known."""


class Asked:
    """`state`: waiting, loading, running or over. `chain`: of its blocks, those included that it has not come to.
    `wanted` tokens are sampled; an engine that plans ahead knows so before (`by_length`), or finds out."""

    lora_request = prompt_embeds = trace_headers = kv_hints = session_id = mm_features = None
    skip_reading_prefix_cache = False

    def __init__(self, request_id: str, args: Mapping[str, Any], arrived_s: float) -> None:
        self.request_id = request_id
        self.scope: int = args["scope"]
        given: int = max(1, args["blocks"] * SIZE - args["short"])
        self.wanted: int = args["tokens"]
        self.by_length: bool = args["by_length"]
        self.leaves_loading: bool = args.get("leaves", False)  # its client goes away as its load begins
        self.text, self.chain = text_of(self.scope, args["chain"], given, self.wanted + _AHEAD)
        self.num_prompt_tokens = self.num_tokens = given
        self.prompt_token_ids = self.text[:given]
        self.block_hashes: list[bytes] = []
        self.cache_salt = SALTS[self.scope][0]
        self.kv_transfer_params = {"kvtier": control_of(args)}
        self.arrived_s = arrived_s
        self.arrival_time = None
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.placeholders = 0  # tokens that steps under way will sample
        self.stale = 0  # tokens in flight for blocks that it had before it was preempted
        self.drops_stale = False
        self.state = "waiting"
        self.told = False  # whether workers have its table
        self.preempted = False
        self.blocks: list[PoolBlock] = []
        self.named = 0  # blocks
        self.failed = False  # a load of it
        self.asks: deque[tuple[float, dict[BlockKey, Before]]] = deque(maxlen=64)
        self.unsure_since_s: float | None = None  # since when the connector does not know what it has of it
        self.loads: range = range(0)  # depths that are being loaded
        self.loads_since_s = 0.0
        self.before: dict[BlockKey, Before] = {}  # of what is loaded
        self.uses = ExitStack()
        self.last_sched_step = -1
        self.name()

    @property
    def all_token_ids(self) -> list[int]:
        return self.text[: self.num_tokens]

    def name(self) -> None:
        """Name the blocks whose tokens are known."""
        known = len(self.block_hashes)
        self.block_hashes += [key[-HASH_BYTES:] for key in self.chain[known : self.num_tokens // SIZE]]

    def sample(self) -> None:
        self.num_tokens += 1
        self.name()

    @property
    def sampled(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def done(self) -> bool:
        return self.sampled >= self.wanted

    @property
    def ids(self) -> list[int]:
        """Its block table."""
        return [block.block_id for block in self.blocks]


def control_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The request's `kvtier` parameter."""
    control: dict[str, Any] = {name: False for name in ("load", "store") if args.get("off") == name}
    if (kind := kind_of(args) or args.get("kind")) is not None:
        control["retention"] = kind
    return control
