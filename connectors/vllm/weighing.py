"""Weighs loads of vLLM's requests against their prefill, and measures both: from a hit to the first token. And weighs
waits for lower tiers against what is found there.

    a prompt comes     → `asks`: whether lower tiers are asked for what G2 lacks of it
    it waits for them  → `waits`, `ready`
    a hit is known     → `worth`: whether it is offered to the engine
    it has got blocks  → `placed`: what it waited for came to this; from here on its load or prefill takes time
    a step has run     → `step`: requests that have their first token tell what they took, and the step what it took

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier.clock import Clock
from kvtier.connectors.ask_gate import AskGate
from kvtier.connectors.load_gate import LoadGate, Verdict
from kvtier.connectors.prefill_clock import PrefillClock
from kvtier.connectors.vllm.messages import StepMeta
from kvtier.connectors.vllm.requests import RequestState
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.manager.manager import Manager
from kvtier.times import Mono

IN_STEP, BETWEEN_STEPS = "in step", "between steps"
"""Ways: loaded within the step that computes the rest; loaded by a step before that."""
_WATCHED_MAX = 4096
_LAUNCHED_MAX = 64
"""Steps whose answers are awaited at most; more would mean that they do not come."""
_BRIEF_EVERY = 16
"""Of steps that compute less than a block, which are many and alike, one in so many is told the gate."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A request from its blocks to its first token; sizes in blocks."""

    state: RequestState
    since_s: float
    target: int  # tokens that it has; one more, and the first was sampled
    computed: float
    loaded: int
    verdict: Verdict | None


class Ran(NamedTuple):
    """A step: tokens that it computed, blocks that arrived with it and how, whether blocks were copied out."""

    began_s: Mono
    tokens: int
    arriving: int = 0
    way: str = ""
    stores: bool = False


def ran_of(output: Any, out: StepMeta, now: Mono) -> Ran:
    """The step that begins now."""
    way = IN_STEP if any(load.in_step for load in out.loads) else BETWEEN_STEPS
    arriving = sum(len(load.moves.blocks) for load in out.loads)
    return Ran(now, output.total_num_scheduled_tokens, arriving, way, bool(out.stores))


def _way_of(state: RequestState) -> str:
    """How the request's blocks would come."""
    return IN_STEP if state.in_step else BETWEEN_STEPS


class Weighing:
    """See the module. Unless it `weighs`, everything is asked for, and worth its load."""

    def __init__(self, limits: ConnectorLimits, requests: Sized, block_tokens: int, clock: Clock) -> None:
        """`requests`: all that the engine has, by now."""
        self._gate = LoadGate() if limits.weighs_loads else None
        self._asks = AskGate(limits.lookup_deadline_s)
        self._gives_up = limits.gives_up
        self._requests = requests
        self._block_tokens = block_tokens
        self._clock = clock
        self._verdicts: dict[str, Verdict] = {}  # of requests that have no blocks yet
        self._waits_since: dict[str, float] = {}  # of those that wait for a promotion
        self._watched: dict[str, _Watched] = {}
        self._free_at_s = 0.0
        self._brief = 0  # steps of less than a block since one of more

    def asks(self, state: RequestState, blocks: int) -> bool:
        """Whether to ask lower tiers for so many blocks, which they may not have."""
        return self._gate is None or self._asks.decide(state.track.name, self._gate.prefill_s(blocks))

    def worth(self, state: RequestState, blocks: int) -> bool:
        """Whether to load so many blocks that lie in G2. Asked anew, the answer is the same, unless they would come by
        another way."""
        if self._gate is None:
            return True
        name, way = state.track.name, _way_of(state)
        known = self._verdicts.get(name)
        if known is None or known.way != way:
            known = self._verdicts[name] = self._gate.decide(way, blocks, len(self._requests) - 1)
        return known.load

    def waits(self, state: RequestState) -> None:
        """The request waits for its promotion."""
        self._waits_since.setdefault(state.track.name, self._clock.monotonic())

    def ready(self, state: RequestState) -> None:
        """It does not wait any more."""
        name = state.track.name
        if (since := self._waits_since.get(name, 0.0)) > 0:  # from now on a length of time, below 0
            self._waits_since[name] = since - self._clock.monotonic()
            state.waited_s -= self._waits_since[name]

    def placed(self, state: RequestState, loaded: int) -> float:
        """The request has got blocks: `state.local` of them held its prefix, `loaded` are being loaded. Returns for how
        many seconds these are worth waiting."""
        name, now = state.track.name, self._clock.monotonic()
        local, state.local = state.local, None
        if local is not None:
            state.resumed, state.held = state.held is not None, local if state.held is None else state.held
        state.placed_s = now if state.placed_s is None else state.placed_s
        if self._gate is None or local is None:
            return math.inf  # told again, since its load has ended
        verdict = self._verdicts.pop(name, None)
        found = sum(tier != "g2" for tier in state.promoted.tiers(local, loaded))
        waited_s, saved_s = -self._waits_since.pop(name, 0.0), self._gate.saves_s(_way_of(state), found)
        if saved_s is None or self._is_lesson(verdict):
            self._asks.forget(name)
        else:
            self._asks.answered(name, waited_s, saved_s)
        target = state.track.request.num_tokens
        computed = max(0.0, target / self._block_tokens - local - loaded)
        if state.given_up and name in self._watched:
            return math.inf  # it computes what it waited for: both were the load's price
        if len(self._watched) < _WATCHED_MAX:
            self._watched[name] = _Watched(state, now, target, computed, loaded, verdict)
        return verdict.patience_s if verdict is not None and loaded and self._gives_up else math.inf

    def _is_lesson(self, verdict: Verdict | None) -> bool:
        """Whether a hit is computed though its load seems worth it, to learn what that costs: the wait for it was not
        in vain."""
        if self._gate is None or verdict is None or verdict.load:
            return False
        return bool(self._gate.saves_s(verdict.way, verdict.blocks))

    def ended(self, name: str) -> None:
        """The request is over; the step that gave it its first token may be this one."""
        watched = self._watched.pop(name, None)
        self._verdicts.pop(name, None)
        self._waits_since.pop(name, None)
        self._asks.forget(name)
        if watched is not None:
            self._observe(watched, self._clock.monotonic())

    def step(self, ran: Ran, now: Mono) -> None:
        """A step has run."""
        seconds, self._free_at_s = now - max(ran.began_s, self._free_at_s), now
        gate = self._gate
        if gate is None:
            return
        blocks = ran.tokens / self._block_tokens
        self._brief = 0 if blocks >= 1 or ran.arriving else self._brief + 1
        if ran.tokens and seconds > 0 and self._brief % _BRIEF_EVERY == 0:
            if ran.arriving:
                gate.stalled(ran.way, ran.arriving, blocks, seconds)
            elif not ran.stores:
                gate.ran(blocks, seconds)
        done = [name for name, watched in self._watched.items() if self._observe(watched, now)]
        for name in done:
            del self._watched[name]

    def _observe(self, watched: _Watched, now: Mono) -> bool:
        """Whether the request has its first token, or failed to load; the former is told the gate."""
        state, gate = watched.state, self._gate
        if state.load_failed and not (state.given_up and watched.loaded):
            return True
        if gate is None or state.track.request.num_tokens <= watched.target:
            return False
        took_s, verdict = now - watched.since_s, watched.verdict
        self._asks.spent(took_s)
        if not watched.loaded:
            gate.computed(watched.computed, took_s, verdict if verdict is not None and not verdict.load else None)
        elif verdict is not None and verdict.load:
            gate.loaded(verdict, watched.computed, took_s)
        return True


class Launched:
    """Steps that the workers have not answered yet; where they end, what they took is weighed, and their prefill is
    reported to the `manager`, if there is one for that."""

    def __init__(
        self, weighing: Weighing, limits: ConnectorLimits, block_tokens: int, manager: Callable[[], Manager | None]
    ) -> None:
        self._weighing = weighing
        self._limits = limits
        self._manager = manager
        self._prefill = PrefillClock(self._computed, block_tokens)
        self._steps: deque[tuple[int, int, Ran]] = deque(maxlen=_LAUNCHED_MAX)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, tokens: int, ran: Ran) -> None:
        """A step was planned that computes `tokens` of prompts, and nothing else; 0 of another kind."""
        self._steps.append((step, tokens, ran))

    def ended(self, step: int, now_s: Mono) -> None:
        """All up to this one have run."""
        while self._steps and self._steps[0][0] <= step:
            _, tokens, ran = self._steps.popleft()
            self._prefill.ran(tokens, ran.began_s, now_s)
            self._weighing.step(ran, now_s)

    def _computed(self, blocks: int, seconds: float) -> None:
        if (manager := self._manager() if self._limits.weighs_loads else None) is not None:
            manager.computed(blocks, seconds)
