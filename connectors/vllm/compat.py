"""Every access to vLLM's objects that its authors do not call stable, in one place, by feature and not by version.

Requests, block tables, the block pool, scheduler output: read here, nowhere else. Written against vLLM 0.26 … 0.33.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import repeat
from string import hexdigits
from typing import Any

from kvtier.connectors.control import gathered
from kvtier.connectors.fallback import or_fallback
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey

_PAUSE_S = 0.002


def going_on(output: Any) -> tuple[Sequence[str], Sequence[Any], Sequence[int]]:
    """Requests of a SchedulerOutput that the workers know, as columns: names, blocks appended to the tables (None for
    none; all of a table where `resumed`), and the first tokens that are computed."""
    cached = output.scheduled_cached_reqs
    return cached.req_ids, cached.new_block_ids, cached.num_computed_tokens


def resumed(output: Any) -> Collection[str]:
    """Those whose whole table is given, since they were preempted."""
    names: Collection[str] = output.scheduled_cached_reqs.resumed_req_ids
    return names


def appended(blocks: Any, group: int = 0) -> Sequence[int]:
    """The table, or its new part, of an entry of `going_on`."""
    return () if blocks is None else blocks[group]


def starting(output: Any, group: int = 0) -> Iterator[tuple[str, Sequence[int], int]]:
    """Requests that are new to the workers: name, table, and the first token that is computed."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids[group], new.num_computed_tokens


def tokens_of(output: Any) -> Mapping[str, int]:
    """Tokens that the step computes of each request."""
    tokens: Mapping[str, int] = output.num_scheduled_tokens
    return tokens


def counts(output: Any) -> Iterator[int]:
    """The same as a column beside those of `going_on`. Where all requests decode, as they mostly do, nothing is looked
    up."""
    tokens, names = output.num_scheduled_tokens, output.scheduled_cached_reqs.req_ids
    one_each = output.total_num_scheduled_tokens == len(tokens) == len(names) + len(output.scheduled_new_reqs)
    return repeat(1, len(names)) if one_each else map(tokens.get, names, repeat(0))


_PREFILL_TOKENS = 16
"""Tokens per request from which on a step is prefill as good as all of it: a request that decodes adds one or a few."""


def prefilled(output: Any) -> int:
    """Tokens that a step computes, if almost all of them are of prompts; 0 for every other step."""
    tokens: int = output.total_num_scheduled_tokens
    return tokens if tokens >= _PREFILL_TOKENS * len(output.num_scheduled_tokens) else 0


def drafted(output: Any) -> Iterable[str]:
    """Requests with draft tokens in this step."""
    return getattr(output, "scheduled_spec_decode_tokens", None) or ()


def drafts_max(vllm_config: Any) -> int:
    """Draft tokens of a request and step at most."""
    return int(getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0)


def drops_blocks(vllm_config: Any) -> bool:
    """Whether the engine's own hits end a block before what its pool has: the drafter's KV of a token is made of the
    next one, too, which the names of blocks do not tell."""
    drops = getattr(getattr(vllm_config, "speculative_config", None), "use_eagle_block_drop", None)
    return bool(drops is not None and drops())


def preempted(output: Any) -> set[str]:
    """Requests whose blocks were taken away in this step."""
    return getattr(output, "preempted_req_ids", None) or set()


def table_of(blocks: Any, group: int = 0) -> list[int]:
    """Block ids of a KVCacheBlocks; 0 where a window or a state has none any more."""
    ids: list[int] = list(blocks.get_block_ids()[group])
    return ids


def hashes_of(request: Any, start: int = 0) -> list[bytes]:
    """The request's chain hashes from block `start` on, as far as its tokens are known."""
    return [bytes(digest) for digest in request.block_hashes[start:]]


def agreed(request: Any, chain: Sequence[BlockKey]) -> int:
    """Leading blocks of a chain, made of the request's hashes earlier, that still have these names. Each name covers
    all tokens before it, so the last one tells of all, and the first that differs can be bisected for."""
    hashes = request.block_hashes
    count = min(len(hashes), len(chain))

    def differs(index: int) -> bool:
        return bool(chain[index][-HASH_BYTES:] != bytes(hashes[index]))

    return bisect_left(range(count), True, key=differs) if count and differs(count - 1) else count


def computed(request: Any) -> int:
    """Leading tokens whose KV the steps that have completed can have left: neither the last sampled token, which was
    never an input, nor drafts that were refused, nor what is planned and has not run."""
    done = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
    return int(min(request.num_tokens - 1, done))


def waits_for_input(request: Any) -> bool:
    """Whether it is a session that has ended a turn, and has no next one yet."""
    return getattr(getattr(request, "status", None), "name", "") == "WAITING_FOR_STREAMING_REQ"


def holds_blocks(request: Any) -> bool:
    """Whether the engine has not taken back all blocks of the request: it begins anew then."""
    return bool(request.num_computed_tokens)


def loads_in_step(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the engine puts right what a load leaves that is made, and fails, within the step that reads it. Only
    where a step's outcome is known before the next one is planned, which could build upon a failed load; where the pool
    can forget names; where a single group of blocks has them, since a state that comes within the step, or fails in it,
    is not put right; and where the step does not clear new blocks, since that might come after the load."""
    from vllm.v1.core.block_pool import BlockPool

    plain = len(kv_cache_config.kv_cache_groups) == 1 and not getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return plain and not plans_ahead(vllm_config) and hasattr(BlockPool, "evict_blocks")


def plans_ahead(vllm_config: Any) -> bool:
    """Whether a step may be planned before it is known what became of the one before. Of a request that turns out to
    have run on wrong blocks, the engine takes back the step that tells so, and not those that are planned already."""
    stages = getattr(getattr(vllm_config, "parallel_config", None), "pipeline_parallel_size", None)
    return stages != 1 or getattr(vllm_config.scheduler_config, "async_scheduling", None) is not False


def stages_of(vllm_config: Any) -> int:
    """Stages of the engine's pipeline."""
    return int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1))


def contexts_of(vllm_config: Any) -> int:
    """Ranks among which decode context parallelism divides the tokens."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def context_of(vllm_config: Any, spec: Any) -> int:
    """The same of one group's blocks: some are whole on every rank."""
    return contexts_of(vllm_config) if getattr(spec, "dcp_sharded", False) else 1


def tells_stages_apart() -> bool:
    """Whether the engine tells its connector of all workers by pipeline stage, and takes answers from all stages."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware")


def end_step_at(request: Any, tokens: int) -> None:
    """Have the engine end a step of the request's prefill after so many tokens, a whole number of blocks, and keep the
    states of there: other prompts were seen to branch off. It does so by itself for what its own pool knows."""
    known = getattr(request, "shared_prefix_boundary", None)
    if known is not None and known < tokens:
        request.shared_prefix_boundary = tokens


def pause_s(vllm_config: Any) -> float:
    """How long a step that does nothing else may wait for what a request waits for: a new request that comes meanwhile
    is kept so long. 0 where other engines wait for this one's steps, as replicas with common experts do."""
    alone = getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_size", None) == 1
    return _PAUSE_S if alone else 0.0


def unwanted(request: Any) -> bool:
    """The request must not read any cache (prompt log-probabilities, say)."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def control_of(request: Any) -> object:
    """The request's `kvtier` parameter, with the hints and the session beside it; None for none."""
    params = getattr(request, "kv_transfer_params", None)
    return gathered(params, getattr(request, "kv_hints", None), getattr(request, "session_id", None))


def public_name(request: Any) -> str:
    """The request's id as its sender knows it: the engine appends eight digits of its own."""
    whole: str = request.request_id
    name, dash, tail = whole.rpartition("-")
    return name if dash and len(tail) == 8 and set(tail) <= set(hexdigits) else whole


def lengths_of(request: Any) -> tuple[int, int, float | None]:
    """Tokens of the request's prompt and of its output, and the wall time of its arrival."""
    given: int = request.num_prompt_tokens
    return given, request.num_tokens - given, getattr(request, "arrival_time", None)


def prompt_of(request: Any) -> Sequence[int]:
    """The token ids of its prompt, as it was given; none of prompt embeddings."""
    return getattr(request, "prompt_token_ids", None) or ()


def trace_of(request: Any) -> Mapping[str, str] | None:
    """The headers of the request's trace, if its sender gave some."""
    return getattr(request, "trace_headers", None)


def adapter_of(request: Any) -> Any | None:
    """The request's LoRARequest, or None."""
    return getattr(request, "lora_request", None)


def salt_of(request: Any) -> str | None:
    return getattr(request, "cache_salt", None) or None


def names_images(vllm_config: Any) -> bool:
    """Whether images and sounds are named by their content. Where nothing in vLLM would reuse them, it counts them: the
    names of two are equal in two processes."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    unused = media is not None and getattr(media, "mm_processor_cache_gb", 1) == 0
    return not unused or bool(vllm_config.cache_config.enable_prefix_caching)


def holds_media(request: Any) -> bool:
    return bool(getattr(request, "mm_features", None))


def holds_foreign_state(request: Any) -> bool:
    """Prompt embeddings are not tokens; older releases do not put them into the hash."""
    return getattr(request, "prompt_embeds", None) is not None


class EnginePool:
    """vLLM's BlockPool, read only but for `unname` and `before_reset`. Its blocks are named by `block_hash`: chain hash
    ‖ group index, a bytes object that is made anew whenever a block is filled anew."""

    def __init__(self, pool: Any, group: int = 0) -> None:
        """`group`: the one whose blocks are meant where names are."""
        self._pool = pool
        self._group = group.to_bytes(4, "big")
        self.blocks: int = pool.num_gpu_blocks
        self.caching: bool = bool(pool.enable_caching)

    def tokens_of(self, blocks: Sequence[int]) -> list[object | None]:
        """The current name object of each block; None where it has none."""
        every = self._pool.blocks
        return [every[block].block_hash for block in blocks]

    def naming(self, tokens: Sequence[Any], keys: Sequence[BlockKey]) -> int:
        """How many leading tokens are the engine's names of these keys, one by one."""
        for count, (token, key) in enumerate(zip(tokens, keys, strict=True)):
            if token is None or token[:HASH_BYTES] != key[-HASH_BYTES:]:
                return count
        return len(tokens)

    def resident(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks of a chain that the pool has under their names."""
        find = self._pool.cached_block_hash_to_block.get_one_block
        for index, key in enumerate(chain):
            if find(key[-HASH_BYTES:] + self._group) is None:
                return index
        return len(chain)

    def has(self, key: BlockKey, group: int) -> bool:
        """Whether the pool has a group's block under its name."""
        name = key[-HASH_BYTES:] + group.to_bytes(4, "big")
        return self._pool.cached_block_hash_to_block.get_one_block(name) is not None

    def named(self, block: int, key: BlockKey, group: int) -> object | None:
        """The block's current name object, if that is the group's name of this key."""
        name: Any = self._pool.blocks[block].block_hash
        return name if name is not None and name == key[-HASH_BYTES:] + group.to_bytes(4, "big") else None

    def hold(self, blocks: Iterable[int]) -> None:
        """Keep blocks from being handed out, whoever else gives them back, until `give_back` or `watch`."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Iterable[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def watch(self, blocks: Iterable[int], reused: Callable[[Any], None]) -> None:
        """Give back held blocks, to be handed out last; `reused` is called with each that is, or that is reset."""
        self._pool.unpin_blocks([self._pool.blocks[block] for block in blocks], on_reuse=reused)

    def watched(self, blocks: Iterable[int], reused: Callable[[Any], None]) -> bool:
        """Whether `reused` still would be called with each of these: the engine calls the last one that watches."""
        watching = self._pool._reuse_watchers
        return all(watching.get(block) is reused for block in blocks)

    def before_reset(self, call: Callable[[], None]) -> None:
        """Have `call` run when the engine is about to reset its pool: that fails while blocks are held, and connectors
        are told of it later, or never where it failed."""
        if (plain := getattr(self._pool, "reset_prefix_cache", None)) is not None:

            def reset() -> bool:
                or_fallback(call, fallback=None)
                return bool(plain())

            self._pool.reset_prefix_cache = reset

    def unname(self, blocks: Collection[int]) -> None:
        """Have the engine forget what it named these blocks: they hold something else. Who has them keeps them."""
        if self.caching:
            self._pool.evict_blocks({block for block in blocks if not self._pool.blocks[block].is_null})

    def free(self) -> int:
        """Blocks that could be handed out."""
        return int(self._pool.get_num_free_blocks())

    def head(self, count: int) -> Iterator[int]:
        """Numbers of the blocks that will be handed out next."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while count and block is not None and block is not queue.fake_free_list_tail:
            yield block.block_id
            block, count = block.next_free_block, count - 1


def hash_problem(algorithm: str, randomised: bool) -> str:
    """Why the engine's block hashes cannot name stored blocks; "" if they can. `randomised`: the interpreter's hashes
    are (PYTHONHASHSEED is not 0), with which releases up to 0.28 seed their own."""
    if not algorithm.startswith("sha256"):
        return (
            f"prefix_caching_hash_algo is {algorithm!r}, which does not resist collisions: blocks that outlive the "
            "process need a cryptographic name; start with --prefix-caching-hash-algo sha256_cbor"
        )
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and randomised:
        return (
            "this vLLM seeds its block hashes at random in every process, so nothing stored would be found again; "
            "set PYTHONHASHSEED=0 for the engine and all replicas"
        )
    return ""


def batch_invariant() -> bool:
    """Whether the engine's kernels are to give the same bits whatever else is in a batch."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def chunks_prefill(vllm_config: Any) -> bool:
    """Whether the engine's kernels compute a part of a prompt behind KV of what comes before."""
    return bool(getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True))


def publishes(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events at all."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def event_queue_of(pool: Any) -> list[Any]:
    """The engine's own events since its last step, which leave before the connector's; else a list nobody reads."""
    queue: list[Any] = getattr(pool, "kv_event_queue", [])
    return queue


def extra_keys_of(request: Any, start: int, stop: int, block_tokens: int) -> list[tuple[Any, ...] | None]:
    """Of the request's blocks from `start` to `stop`, which lie beside the tokens in vLLM's hashes: adapter, images and
    salt, as vLLM's events have them. Only blocks with images or a salt are looked at one by one."""
    lora = getattr(request, "lora_request", None)
    out: list[tuple[Any, ...] | None] = [None if lora is None else (lora.lora_name,)] * (stop - start)
    own = {0} if start == 0 and salt_of(request) is not None else set()
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        last = -(-(place.offset + place.length) // block_tokens)
        own.update(range(max(start, place.offset // block_tokens), min(stop, last)))
    if own:
        from vllm.v1.core import kv_cache_utils

        untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)  # older releases tag nothing
        seen = 0
        for depth in sorted(own):
            begin = depth * block_tokens
            keys, seen = kv_cache_utils.generate_block_hash_extra_keys(request, begin, begin + block_tokens, seen)
            (out[depth - start],) = untagged([keys])
    return out


def kind_of(kv_cache_config: Any) -> str | None:
    """vLLM's name of the kind of its KV cache group; None where this release has none."""
    try:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
    except ImportError:
        return None
    return str(get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[0].kv_cache_spec).value)


def on_gpu(vllm_config: Any) -> bool:
    """Whether the workers' KV tensors lie on CUDA devices."""
    return str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")) == "cuda"


def block_major_layout(vllm_config: Any) -> str | None:
    """The name of the cache layout in which a block's layers lie side by side, so that it is copied as one run; None
    where the release (before 0.30) or the device knows none. Backends of SM100 read heads before tokens. vLLM passes
    over a layout that its backend cannot read."""
    if not on_gpu(vllm_config) or find_spec("vllm.v1.kv_cache_layout") is None:
        return None
    from vllm.platforms import current_platform

    return "BLHNC" if current_platform.is_device_capability_family(100) else "BLNHC"


def takes_cross_layers(vllm_config: Any) -> bool:
    """Whether vLLM 0.27 or 0.28 should keep all layers in one tensor, blocks outside: a block's layers lie side by side
    then, with tokens before heads. The other order puts the layers inside of the heads, and is not asked for."""
    if not on_gpu(vllm_config) or find_spec("vllm.v1.kv_cache_layout") is not None:
        return False
    layout = getattr(import_module("vllm.v1.attention.backends.utils"), "get_kv_cache_layout", None)
    return layout is not None and layout() == "NHD"


def layers_of(cross_layers: Any, attn_backend: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Each layer's view of the tensor of all, as `allocate_uniform_kv_caches` of these releases hands them out."""
    try:
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):
        order = range(cross_layers.dim())
    layers_first = cross_layers.permute(*(order.index(axis) for axis in range(len(order))))
    return {
        name: layers_first[number]
        for number, tensor in enumerate(kv_cache_config.kv_cache_tensors)
        for name in tensor.shared_by
    }
