"""One process of the demo: open the tiers, take turns, measure and check each, report.

    python -m kvtier.demo.run JOB.json

Reports are JSON objects, one per line of standard output: `{"event": "turn", …}` for every turn, then
`{"event": "end", …}`, or `{"event": "error", "message": …}` and exit status 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.config import Config
from kvtier.connectors.transformers import PrefixCache
from kvtier.connectors.transformers.model import probe
from kvtier.demo import model as models
from kvtier.demo import script as scripts
from kvtier.demo.job import TIERS, Job, Turn
from kvtier.demo.reference import Reference, parting_gap
from kvtier.errors import KVTierError

BLOCK_TOKENS = 16
_ALIGN = 4096


class DemoRun:
    """The turns of one process on an open PrefixCache."""

    def __init__(self, subject: models.Subject, prefixes: PrefixCache, reference: Reference, new_tokens: int) -> None:
        self._subject = subject
        self._prefixes = prefixes
        self._reference = reference
        self._new_tokens = new_tokens

    def turn(self, name: str, history: list[int], question: str) -> tuple[Turn, list[int]]:
        """Answer the prompt `history` three ways, compare, store. Returns the report and the reply's tokens, less the
        one that ends it: the next turn begins with that."""
        prefixes, reference, config = self._prefixes, self._reference, self._subject.model.config
        before, groups_before = dict(prefixes.served), _copied(prefixes.groups_served)
        ids = self._ids(history)
        begin = time.perf_counter()
        cache, hit = prefixes.fetch(ids, advance=False)
        fetched_s = time.perf_counter() - begin
        restored = hit // BLOCK_TOKENS
        end = reference.end_of(cache)
        with self._ends(cache) as ends:
            begin = time.perf_counter()
            passes = prefixes.advance(cache, ids)
            output, first_token, _ = self._generate(ids, cache)
            ttft_hit = fetched_s + first_token - begin
        keys = prefixes.cache.chain_hashes(output[0][: cache.get_seq_length()].cpu().numpy())
        blocks = reference.cut(cache, len(keys))
        same_bytes = all(map(reference.holds, keys[:restored], blocks[:restored]))
        if restored and end:
            same_bytes = same_bytes and reference.holds_end(keys[restored - 1], end)
        prefixes.store(output, cache, attention_mask=output.new_ones(output.shape))
        reference.add(keys[restored:], blocks[restored:])
        for tokens, left in ends.items():
            reference.add_end(keys[tokens // BLOCK_TOKENS - 1], left)
        prefixes.flush()  # a user's pause is longer than this
        mine = output[0, len(history) :].tolist()
        memory = reference.prefix(keys[:restored], blocks[:restored], config, end)
        self._pass(ids, memory, hit, passes)
        in_memory, _, _ = self._generate(ids, memory)
        begin = time.perf_counter()
        full, first_token, logits = self._generate(ids, None)
        report = Turn(
            conversation=name,
            prompt_tokens=len(history),
            served={tier: count - before.get(tier, 0) for tier, count in prefixes.served.items()},
            groups={
                group: {tier: count - groups_before.get(group, {}).get(tier, 0) for tier, count in tiers.items()}
                for group, tiers in prefixes.groups_served.items()
            },
            ttft_hit_ms=ttft_hit * 1e3,
            ttft_recompute_ms=(first_token - begin) * 1e3,
            blocks_restored=restored,
            bytes_same=same_bytes,
            tokens_same=mine == in_memory[0, len(history) :].tolist(),
            gap=parting_gap(mine, full[0, len(history) :].tolist(), logits),
            question=question,
            answer=self._subject.decode(mine).strip(),
        )
        return report, mine[:-1] if mine[-1] in self._subject.ends else mine

    def _ids(self, tokens: list[int]) -> Any:
        import torch

        return torch.tensor([tokens], device=self._subject.model.device)

    @contextmanager
    def _ends(self, cache: Any) -> Iterator[dict[int, Any]]:
        """What windows and states hold wherever a pass over this cache ends with a block, by tokens."""
        ends: dict[int, Any] = {}

        def look(_module: Any, _args: Any, _output: Any) -> None:
            tokens = cache.get_seq_length()
            if tokens % BLOCK_TOKENS == 0 and (left := self._reference.end_of(cache)):
                ends[tokens] = left

        hook = self._subject.model.register_forward_hook(look)
        try:
            yield ends
        finally:
            hook.remove()

    def _pass(self, ids: Any, cache: Any, begin: int, ends: Sequence[int]) -> None:
        """Run the model over the prompt in passes that end at these tokens."""
        import torch

        for end in ends:
            with torch.no_grad():
                self._subject.model(
                    ids[:, begin:end], attention_mask=torch.ones_like(ids[:, :end]), past_key_values=cache
                )
            begin = end

    def _generate(self, ids: Any, cache: Any) -> tuple[Any, float, Any]:
        """Greedy tokens after the prompt `ids`, when the first of them was there, and the logits of all."""
        import torch
        from transformers import GenerationConfig

        stopwatch = _FirstToken()
        greedy = GenerationConfig(
            max_new_tokens=self._new_tokens, do_sample=False, eos_token_id=sorted(self._subject.ends) or None,
            pad_token_id=0, use_cache=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        out = self._subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=greedy,
            streamer=stopwatch,
        )
        return out.sequences, stopwatch.at, out.logits


def _copied(groups: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {group: dict(tiers) for group, tiers in groups.items()}


class _FirstToken:
    """A streamer of transformers: it is given the prompt, then every token."""

    def __init__(self) -> None:
        self.at = 0.0
        self._puts = 0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def tiers_for(job: Job, block_bytes: int, longest_blocks: int) -> Config:
    """Tiers so small that each holds less than the one below it, and G1 … G3 less than all conversations. Pure.

    In conversations of the greatest length: G1 0.75, G2 1.5, G3 2.25.
    """
    slot = -(-block_bytes // _ALIGN) * _ALIGN
    tiers = {
        "g1": {"blocks": max(4, longest_blocks * 3 // 4)},
        "g2": {"capacity": max(8, longest_blocks * 3 // 2) * slot},
        "g3": {"path": str(Path(job.folder, "g3")), "capacity": max(12, longest_blocks * 9 // 4) * slot},
        "g4": {"url": job.g4, "stride": 4, "options": dict(job.g4_options)},
    }
    return Config.parse({"tiers": tiers})


def play(
    job: Job, report: Callable[[Turn], None], tamper: Callable[[PrefixCache], None] | None = None
) -> dict[str, Any]:
    """Run one process's turns, handing each to `report`. Returns the end of the report.

    `tamper` is called before each turn, for tests that must see the comparisons fail.
    """
    subject = models.build(job.seed) if job.model is None else models.load(Path(job.model), chats=job.real)
    script = scripts.shortened(scripts.read(real=job.real), job.conversations, job.turns)
    speech = subject.speech(script.system)
    opening = subject.encode(speech.opening)
    user_turns = [
        [subject.encode(speech.turn(text, first=not at)) for at, text in enumerate(c.turns)]
        for c in script.conversations
    ]
    longest = len(opening) + max(sum(map(len, c)) + job.new_tokens * len(c) for c in user_turns)
    shape = probe(subject.model)
    reference = Reference(shape, BLOCK_TOKENS)
    folder = Path(job.folder)
    beside = 2 * job.turns * sum(shape.groups.counts(longest, reference.block_bytes))  # ends of prompts and answers
    config = tiers_for(job, reference.block_bytes, longest // BLOCK_TOKENS + beside)
    names = [c.name for c in script.conversations]
    prompts: list[list[int]] = [list(opening) for _ in names]
    with PrefixCache(config, subject.model, block_tokens=BLOCK_TOKENS, name="kvtier-demo") as prefixes:
        replay = DemoRun(subject, prefixes, reference, job.new_tokens)
        if job.resume:
            reference.load(folder / "reference.bin")
            prompts = json.loads((folder / "prompts.json").read_text())
            speakers = list(range(len(names)))
        else:
            speakers = scripts.order(len(names), job.turns)
        spoken = [0] * len(names)
        last: list[list[int]] = [[] for _ in names]
        for number in speakers:
            if tamper is not None:
                tamper(prefixes)
            if not job.resume:
                prompts[number] = prompts[number] + user_turns[number][spoken[number]]
                spoken[number] += 1
            last[number] = list(prompts[number])
            said = script.conversations[number].turns
            turn, reply = replay.turn(names[number], prompts[number], said[spoken[number] - 1])
            prompts[number] = prompts[number] + reply
            report(turn)
        if not job.resume:
            reference.save(folder / "reference.bin")
            (folder / "prompts.json").write_text(json.dumps(last))
        served = {tier: prefixes.served[tier] for tier in (*TIERS, "recomputed")}
        stats = prefixes.stats()
        if job.resume and not job.g4.startswith("file:"):
            prefixes.cache.evict("g4")  # a prefix of the demo's own
    sizes = {"g1": config.tiers.g1.blocks, "g2": config.tiers.g2.capacity // reference.block_bytes}
    return {
        "served": served,
        "groups": _copied(prefixes.groups_served),
        "gap": subject.gap,
        "block_bytes": reference.block_bytes,
        "blocks": sizes,
        "stats": stats,
    }


def main(argv: list[str]) -> None:
    """The process."""
    job = Job(**json.loads(Path(argv[1]).read_text()))

    def write(event: str, value: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **value}, default=str), flush=True)

    try:
        end = play(job, lambda turn: write("turn", asdict(turn)))
    except (KVTierError, OSError, ImportError) as error:  # foreseen: a line instead of a traceback
        write("error", {"message": str(error)})
        sys.exit(1)
    write("end", end)


if __name__ == "__main__":
    main(sys.argv)
