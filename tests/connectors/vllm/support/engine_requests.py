"""Requests of every kind to an engine: a part of engine_host.Host, in the engine's process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any


def image_of(seed: int) -> Any:
    """A picture of noise."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8))


class Requests(ABC):
    """Asks `llm`, whole or step by step; what needs the engine's `core` runs with the scheduler in this process."""

    llm: Any
    core: Any

    @abstractmethod
    def settle(self) -> None:
        """Step an idle engine until all is copied, as one in a process of its own does by itself."""

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 24,
        salt: str | None = None,
        control: Any = None,
        settle: bool = True,
        adapter: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = None if control is None else {"kv_transfer_params": {"kvtier": control}}
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        lora = {"lora_request": LoRARequest(*adapter)} if adapter else {}
        outs = self.llm.generate(asked, sampling, use_tqdm=False, **lora)
        if settle:
            self.settle()
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "finish": out.outputs[0].finish_reason,
                "id": out.request_id,
                "answer": (out.kv_transfer_params or {}).get("kvtier") or {},
                "read": ((out.kv_transfer_params or {}).get("kvtier") or {}).get("tokens_read", {}),
            }
            for out in outs
        ]

    def hint(
        self,
        prompt: list[int],
        actions: list[dict[str, Any]],
        session: str | None = None,
        beside: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> dict[str, Any]:
        """The answer to a request with vLLM's own envelope and session, and `beside` in its `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        engine, extra = self.llm.llm_engine, None if beside is None else {"kv_transfer_params": beside}
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra)
        envelope = KvHintsEnvelope("1.0", "message", [KvHintAction(**action) for action in actions])
        asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        engine.add_request("hinted", asked, sampling, session_id=session, kv_hints=envelope)
        answer: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                answer = (out.kv_transfer_params or {}).get("kvtier") or answer
        self.settle()
        return answer

    def ask(
        self,
        prompts: list[list[int]],
        tokens: int = 24,
        salt: str | None = None,
        sampling: dict[str, Any] | None = None,
        choice: list[str] | None = None,
        beam: int = 0,
        priorities: bool = False,
        adapter: list[Any] | None = None,
        images: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        """All answers to each prompt, however they are sampled. `images`: what each prompt shows, by its seed."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        for one, seed in zip(asked, images or (), strict=False):
            one["multi_modal_data"] = {"image": image_of(seed)}
        if beam:
            found = self.llm.beam_search(asked, BeamSearchParams(beam_width=beam, max_tokens=8, ignore_eos=True))
            return [{"all": [list(one.tokens) for one in out.sequences], "read": {}} for out in found]
        given: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": not choice, **(sampling or {})}
        if choice:
            given["structured_outputs"] = StructuredOutputsParams(choice=choice)
        params = SamplingParams(detokenize=False, **given)
        more: dict[str, Any] = {"lora_request": LoRARequest(*adapter)} if adapter else {}
        if priorities:
            more["priority"] = [number % 3 for number in range(len(prompts))]
        outs = self.llm.generate(asked, params, use_tqdm=False, **more)
        return [
            {
                "all": [list(one.token_ids) for one in out.outputs],
                "read": ((out.kv_transfer_params or {}).get("kvtier") or {}).get("tokens_read", {}),
            }
            for out in outs
        ]

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """What a pooling model answers."""
        outs = self.llm.embed([{"prompt_token_ids": one} for one in prompts], use_tqdm=False)
        return [[round(value, 4) for value in out.outputs.embedding] for out in outs]

    def session(self, name: str, parts: list[list[int]], tokens: int) -> list[list[int]]:
        """A streaming session: inputs one after another, each answered with so many tokens, of which vLLM drops the
        last one when the next input comes. Returns all tokens of the session after each answer."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        scheduler, seen = self.core.scheduler, []

        def send(part: list[int], resumable: bool) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            self.core.add_request(
                Request(
                    request_id=name, prompt_token_ids=list(part), sampling_params=sampling, pooling_params=None,
                    block_hasher=self.core.request_block_hasher, resumable=resumable,
                )
            )  # fmt: skip

        for part in parts:
            send(part, True)
            deadline = time.monotonic() + 60
            while scheduler.get_num_unfinished_requests() and time.monotonic() < deadline:
                self.core.step_fn()
            seen.append(list(scheduler.requests[name].all_token_ids))
        send([1], False)
        self.settle()
        return seen

    def add(self, name: str, prompt: list[int], tokens: int = 24, load: bool = True) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": {"kvtier": {"load": load}}},
        )  # fmt: skip
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.llm.llm_engine.step()

    def steps_to_end(self, limit: int) -> int:
        """Step until all requests have ended, `limit` times at most; how often that was."""
        engine, count = self.llm.llm_engine, 0
        while engine.has_unfinished_requests() and count < limit:
            engine.step()
            count += 1
        return count

    def run_out(self) -> dict[str, list[int]]:
        """Step until all requests have ended. Returns what they sampled, by name."""
        engine = self.llm.llm_engine
        ended = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                ended[out.request_id] = list(out.outputs[0].token_ids) if out.finished else []
        return ended

    def timed(self, prompts: list[list[int]], tokens: int = 4) -> dict[str, Any]:
        """Like generate; `seconds` from the first to the last."""
        began = time.monotonic()
        outs = self.generate(prompts=prompts, tokens=tokens, settle=False)
        return {"tokens": [out["tokens"] for out in outs], "seconds": time.monotonic() - began}
