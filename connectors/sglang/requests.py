"""Requests of one rank between their first look-up and their admission: their blocks, their promotion, and the answers
to their senders.

Used from the scheduler's thread only; nothing here waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.cache import Cache
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.connectors.control import Control, Controls, Scopes, gathered
from kvtier.connectors.counters import tokens_by_tier
from kvtier.connectors.feedback import Feedback, Wishes
from kvtier.connectors.identity import engine_keys
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.settings import Settings
from kvtier.connectors.sglang import adapters
from kvtier.identity.keys import BlockKey, Scope
from kvtier.journal.served import ServedRequest
from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

_REQUESTS_MAX = 4096
_NAME = "kvtier"


@dataclass(slots=True)
class QueuedRequest:
    """One request. `chain` is its prompt's whole pages, from the first; empty until they are known, and where they may
    not be cached."""

    until_s: Mono  # it is passed over, for its blocks, at most until then
    chain: list[BlockKey] = field(default_factory=list)
    start: int = 0  # pages that are on the device
    known: int = 0  # leading pages that are known, though not all may be of use; of models with windows
    boundaries: Sequence[int] = ()  # of a model with windows: those that G2 had, ascending,
    looked: tuple[int, int, bool] | None = None  # and between which pages they were looked for, promoted or not yet
    control: Control | None = None  # known with the chain, as the scope is
    scope: Scope | None = None
    promoted: Promoted = field(default_factory=Promoted)
    wishes: Wishes | None = None
    begun: bool = False  # what its sender wishes
    waits: bool = False  # as of the last look-up
    decided: bool = False  # on every rank: waits no longer
    lease: Lease | None = None  # of its load

    @property
    def reads(self) -> bool:
        """Whether it may and wants to have blocks from below."""
        return bool(self.chain) and self.control is not None and self.control.load


class QueuedRequests:
    """The requests that are being looked up, and the counters of those that were admitted."""

    def __init__(self, settings: Settings, block_tokens: int, current: Callable[[], Config] | None = None) -> None:
        """`current`: the configuration in force, as far as it may change."""
        self._block_tokens = block_tokens
        self._wait_s = settings.config.deadlines.get
        self._config, self._current = settings.config, current or (lambda: settings.config)
        self._controls, self._scopes = Controls(settings.config), Scopes(settings.config)
        self._of: OrderedDict[str, QueuedRequest] = OrderedDict()
        self.events: Counter[str] = Counter()
        self.tokens_read: Counter[str] = Counter()  # by tier
        self._feedback = Feedback(block_tokens, self._controls.hint_share)

    def __len__(self) -> int:
        return len(self._of)

    def of(self, rid: str) -> QueuedRequest | None:
        return self._of.get(rid)

    def arrive(self, rid: str) -> QueuedRequest:
        """The request, a new one if it is unknown. Cannot fail: all ranks have the same requests, since they vote on
        them. Where the oldest is forgotten for it, it waits for nothing: each pass over a queue of more requests than
        are remembered would forget all of them and begin anew, and none would ever be admitted."""
        queued = self._of.get(rid)
        if queued is None:
            queued = self._of[rid] = QueuedRequest(SystemClock().monotonic() + self._wait_s)
            while len(self._of) > _REQUESTS_MAX:
                self.forget(next(iter(self._of)))
                queued.decided = True
        return queued

    def update_chain(
        self, queued: QueuedRequest, req: Any, head: Callable[[], list[str]], tail: Sequence[str], cache: Cache
    ) -> bool:
        """`tail` are the pages of the prompt that the device lacks now, after `head()`. The first time the prompt is
        pinned, if its sender asked for that. Returns whether the chain is another one than before."""
        known = queued.chain[queued.start :]
        if tail and len(known) == len(tail) and known[-1].endswith(bytes.fromhex(tail[-1])):
            return False
        if queued.control is None:
            queued.control, queued.scope = self.control_of(req)
        control, scope = queued.control, queued.scope
        if scope is None:
            return False
        hashes = [*head(), *tail]
        queued.chain = engine_keys(scope, [bytes.fromhex(page) for page in hashes])
        queued.start = len(hashes) - len(tail)
        if not queued.begun:
            queued.begun = True
            queued.wishes = self._feedback.begin(cache, scope, control, queued.chain)
        return True

    def control_of(self, req: Any) -> tuple[Control, Scope | None]:
        """The request's parameters, and its scope (None: it may not be cached)."""
        if (config := self._current()) is not self._config:
            self._controls, self._config = Controls(config), config
        custom = getattr(getattr(req, "sampling_params", None), "custom_params", None)
        raw = gathered(custom, getattr(req, "kv_hints", None), getattr(req, "session_id", None))
        control = self._controls.parse(raw)
        # SGLang folds an adapter's id into the extra key, which seeds the page hashes; both also name the scope.
        adapter = (req.extra_key or "").encode(errors="surrogatepass")
        if (number := getattr(req, "lora_id", None)) is not None:
            if not (name := adapters.name_of(number)):
                return control, None
            adapter += b"\0" + name.encode()
        return control, self._scopes.of(req.cache_salt, adapter, control.request)

    def resident(self, queued: QueuedRequest, cache: Cache) -> int:
        """Blocks from `queued.start` on that G2 has now. The first time it begins to promote the ones it lacks, and
        decides whether they are worth waiting for."""
        if not queued.reads:
            return 0
        # Read before G2 is: blocks of a promotion that is done can be found then. None is taken before that, though it
        # may be there already: only then is the tier known in which it was.
        up = queued.promoted.done
        found = cache.manager.prefix(queued.chain[queued.start :])
        if queued.decided or not cache.manager.lower or (up and self._is_whole(queued, found, cache)):
            queued.waits = False
            return found
        if queued.promoted.future is None:
            queued.promoted, up = self._promote(queued, cache), False
        queued.waits = not up and SystemClock().monotonic() < queued.until_s
        if not up and not queued.waits:
            self.events["lookups_late"] += 1
        return found

    def restorable(self, queued: QueuedRequest, cache: Cache) -> list[int]:
        """Lengths, in pages after those on the device, at which the prompt can go on with what G2 has; see
        `resident`."""
        return list(range(1, self.resident(queued, cache) + 1))

    def _is_whole(self, queued: QueuedRequest, found: int, cache: Cache) -> bool:
        """Whether G2 has all that the request can be given below the device, of which it has the first `found`."""
        return queued.start + found == len(queued.chain)

    def _promote(self, queued: QueuedRequest, cache: Cache) -> Promoted:
        """Begin to bring up what the request lacks."""
        work = cache.manager.promote(queued.chain, queued.until_s, queued.start)
        return Promoted(cache.submit(work), queued.start)

    def admit(self, req: Any, head: Callable[[], list[str]] | None, cache: Cache) -> None:
        """The request is in the next batch: count its blocks, put the answer to its sender into its output, and forget
        it. `head()` is its prompt where nothing was looked up, since the device has all of it."""
        queued = self.of(req.rid) or QueuedRequest(Mono(0))
        if head is not None:
            self.update_chain(queued, req, head, (), cache)
        read, answer = self._record(queued, cache), {}
        if queued.control is not None and queued.scope is not None:
            self._tell(req, queued, read, cache)
            known = queued.scope, queued.control, queued.chain, read, queued.wishes, queued.start
            answer = self._feedback.of(req.rid, *known)
        put_answer(req, {"tokens_read": dict(read), **answer}, queued.wishes)
        self.forget(req.rid)

    def _tell(self, req: Any, queued: QueuedRequest, read: Mapping[str, int], cache: Cache) -> None:
        """It is admitted: tell whoever listens, and remember it."""
        cache.trace.record(queued.chain, len(queued.chain) * self._block_tokens)
        if queued.scope is None or not cache.journal.active:
            return
        clock = SystemClock()
        took_s = clock.monotonic() - queued.until_s + self._wait_s if queued.until_s else 0.0
        missed = queued.lease.miss if queued.lease is not None else queued.promoted.miss()
        whole = queued.start + sum(read.values()) // self._block_tokens >= len(queued.chain)
        given = Counter(g1=queued.start * self._block_tokens) + Counter(read)
        why = "" if whole else str(missed or Miss.ABSENT)
        served = ServedRequest(
            req.rid, queued.scope, clock.wall() - took_s, len(req.origin_input_ids), 0, given, why,
            placed_s=took_s if queued.until_s else None,
        )  # fmt: skip
        cache.journal.record(served, queued.chain, req.origin_input_ids)

    def _record(self, queued: QueuedRequest, cache: Cache) -> Mapping[str, int]:
        """Count the blocks that were asked for below the device. Returns tokens by the tier they came from."""
        asked = len(queued.chain) - queued.start
        if not (asked and queued.reads):
            return {}
        if queued.lease is None:
            with cache.manager.pin(()) as nothing:
                nothing.miss = queued.promoted.miss() or Miss.ABSENT
                cache.manager.count(nothing, asked)
            return {}
        cache.manager.count(queued.lease, asked)
        read = tokens_by_tier(queued.lease.tiers, self._block_tokens)
        self.tokens_read.update(read)
        return read

    def forget(self, rid: str) -> None:
        """Forget a request: the blocks that were promoted for it may be evicted again."""
        queued = self._of.pop(rid, None)
        if queued is not None:
            queued.promoted.abandon()

    def clear(self) -> None:
        for rid in list(self._of):
            self.forget(rid)


def put_answer(req: Any, answer: dict[str, Any], wishes: Wishes | None = None) -> None:
    """Put `answer` into the request's output, as `meta_info["kvtier"][0]`; what its sender wished follows when
    it is known. A request that was sent back to the queue and is admitted again has read twice; what of its prompt was
    cached is what it found the first time."""
    info = getattr(req, "customized_info", None) or {}
    if earlier := info.get(_NAME):
        answer = {**answer, "tokens_read": dict(Counter(earlier[0]["tokens_read"]) + Counter(answer["tokens_read"]))}
        answer |= {"usage": earlier[0]["usage"]} if "usage" in earlier[0] else {}
    # SGLang takes values by the number of the output token: this one comes with the first.
    values = [answer]
    req.customized_info = {**info, _NAME: values}
    if wishes is not None:

        def ended(done: Wishes) -> None:
            if not done.cancelled() and done.exception() is None:
                values[0] = {**answer, **done.result()}
            elif "pin" in answer:
                values[0] = {**answer, "pin": {"name": answer["pin"]["name"], "refused": True}}

        # The answer may be sent meanwhile: it has one dictionary or the other, and neither changes.
        wishes.add_done_callback(ended)
