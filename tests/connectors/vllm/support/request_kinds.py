"""Requests of vLLM's own class, and the events that its block pool makes of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a request's blocks hold beside tokens."""

    PLAIN = "plain"
    SALTED = "salted"
    ADAPTER = "adapter"
    SALTED_ADAPTER = "salted adapter"
    IMAGES = "images"


def engine_request(kind: Kind, tokens: int, size: int) -> tuple[Any, Callable[[int, int], Any]]:
    """A request, and the event that vLLM makes when it fills these of its blocks."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    extra: dict[str, Any] = {}
    if kind in (Kind.SALTED, Kind.SALTED_ADAPTER):
        extra["cache_salt"] = "dynamo-cache-salt:tenant"
    if kind in (Kind.ADAPTER, Kind.SALTED_ADAPTER):
        extra["lora_request"] = LoRARequest("tuned", 7, "/nowhere")
    if kind is Kind.IMAGES:
        extra["mm_features"] = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))
            for name, offset, length in (("a" * 64, size // 2, size), ("b" * 64, 3 * size, 2 * size + 1))
        ]
    request = Request(
        request_id="0",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(size, sha256_cbor),
        **extra,
    )

    def event(first: int, last: int) -> Any:
        pool = BlockPool(last + 2, True, size, enable_kv_cache_events=True)
        pool.cache_full_blocks(request, pool.get_new_blocks(last), first, last, size, 0)
        (made,) = pool.take_events()
        return made

    return request, event
