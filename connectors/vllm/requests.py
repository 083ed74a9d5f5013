"""Requests of vLLM: their parameters and scope, and their state between arrival and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.cache import Cache
from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.connectors.control import Control, Controls, Scopes
from kvtier.connectors.feedback import Wishes
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.confirm import Track
from kvtier.connectors.vllm.identity import Adapters
from kvtier.identity.keys import BlockKey, Scope
from kvtier.journal.served import ServedRequest
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import BlockTerms
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono


class RequestReader:
    """Reads from the engine's requests how they are cached."""

    def __init__(
        self,
        config: Config,
        *,
        names_images: bool = True,
        plans_ahead: bool = False,
        current: Callable[[], Config] | None = None,
    ) -> None:
        """`names_images`: whether the engine names images by what they show. `plans_ahead`: whether it plans steps
        before it knows what became of those before. `current`: the configuration in force, as far as it may change."""
        self.controls, self._config = Controls(config), config
        self.default = default_terms(self.controls)
        """The terms of blocks without other ones; None once a reload has changed them, since G2 has some of either."""
        self._current = current or (lambda: config)
        self._names_images = names_images
        self._plans_ahead = plans_ahead
        self._scopes = Scopes(config)
        self._adapters = Adapters()

    def read(self, request: Any) -> tuple[Control, Scope | None]:
        """The request's parameters, and its scope: None where it may not be cached. Reads files of new adapters."""
        if (config := self._current()) is not self._config:
            self.controls, self._config = Controls(config), config
            if default_terms(self.controls) != self.default:
                self.default = None
        control = self.controls.parse(compat.control_of(request))
        adapter = self._adapters.of(compat.adapter_of(request))
        unnamed = not self._names_images and compat.holds_media(request)
        if adapter is None or unnamed or compat.holds_foreign_state(request):
            return control, None
        return control, self._scopes.of(compat.salt_of(request), adapter, control.request)

    def adapter_of(self, request: Any) -> tuple[int, str] | None:
        """The request's adapter, by id and name; None without one."""
        adapter = compat.adapter_of(request)
        return None if adapter is None else (adapter.lora_int_id, (self._adapters.of(adapter) or b"").decode("ascii"))

    def certain(self, adapter: tuple[int, str] | None) -> bool:
        """Whether blocks of an adapter (None: of none) may be loaded: workers load it when a request of it runs first.
        If it turns out to be another one then, a step that is planned ahead of that has read them, too."""
        return not self._plans_ahead or adapter is None or self._adapters.loaded(adapter[0])

    def told(self, adapters: Mapping[int, str]) -> set[int]:
        """The workers have loaded these adapters, by id. Returns the ids that were taken for others until now."""
        return self._adapters.told(adapters)


def default_terms(controls: Controls) -> BlockTerms | None:
    """Of a block whose request says nothing."""
    return controls.parse(None).chain_terms(1).only


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. `scope` is None where it may not be cached; `lease` pins blocks from depth `lease_start` on."""

    track: Track
    scope: Scope | None
    control: Control
    adapter: tuple[int, str] | None = None  # id and name
    arrived_s: Mono | None = None
    promoted: Promoted = field(default_factory=Promoted)
    wishes: Wishes | None = None
    placed_s: Mono | None = None  # when it was first given blocks
    first_s: Mono | None = None  # when its first token was known
    waited_s: float = 0.0  # for the promotion
    why: str = ""  # no more of it was read
    wait_until_s: Mono | None = None  # for the promotion
    local: int | None = None  # blocks that the engine has itself, from its question until it gives the request a table
    held: int | None = None  # blocks that it had itself when the request was first given a table
    resumed: bool = False  # whether the request lost that table, and was given another one
    lease: Lease | None = None
    also: Lease | None = None  # pins what other groups need where the lease ends
    more: Sequence[tuple[int, Slot]] = ()  # blocks of other groups that are to be loaded from slots that `also` pins
    known: int = 0  # leading blocks that were known when it was matched, though not all may be of use
    lease_start: int = 0
    lease_usable: int = 0  # blocks that the request could have read when the lease was taken
    lease_until_s: float = 0.0  # monotonic
    load_failed: bool = False  # it is offered none any more
    given_up: bool = False  # since its load took too long
    in_step: bool = False  # whether what was offered last is loaded within the step that computes the rest
    asked: int = 0  # blocks beyond the engine's own hit, until their reading is recorded
    read: Counter[str] = field(default_factory=Counter)  # tokens by tier
    reread: Counter[str] = field(default_factory=Counter)  # those of them that were read when it was resumed

    def __post_init__(self) -> None:
        self.track.adapter = "" if self.adapter is None else self.adapter[1]

    def prompt(self, block_tokens: int) -> list[BlockKey]:
        """The keys of the prompt's whole blocks."""
        return self.track.chain[: self.track.request.num_prompt_tokens // block_tokens]

    def runs(self, clock: Clock) -> None:
        """A step of it has run."""
        request = self.track.request
        if self.first_s is None and request.num_tokens > request.num_prompt_tokens:
            self.first_s = clock.monotonic()

    def tell(self, cache: Cache, prompt: Sequence[BlockKey], read: Mapping[str, int], clock: Clock) -> None:
        """It has ended: tell whoever listens, and remember it."""
        request, now = self.track.request, clock.monotonic()
        given, output, arrival_s = compat.lengths_of(request)
        cache.trace.record(prompt, given, output, arrival_s)
        if self.scope is None or not cache.journal.active:
            return
        block_tokens = cache.namespace.block_tokens
        times = [None if at is None or self.arrived_s is None else at - self.arrived_s
                 for at in (self.placed_s, self.first_s, now)]  # fmt: skip
        found = Counter(g1=(self.held or 0) * block_tokens) + (Counter(read) - self.reread)
        served = ServedRequest(
            compat.public_name(request), self.scope, clock.wall() if arrival_s is None else arrival_s, given, output,
            found, self.why, times[0], self.waited_s, *times[1:],
        )  # fmt: skip
        cache.journal.record(served, prompt, compat.prompt_of(request))

    def forget_found(self) -> None:
        """What was found for it, or is being looked for, is not wanted any more."""
        self.drop_lease()
        self.promoted.abandon()
        self.promoted = Promoted()

    def give_up(self) -> None:
        """Neither read nor keep anything more of it."""
        self.drop_lease()
        self.scope, self.track.storable = None, False

    def offered(self, block_tokens: int) -> tuple[int, bool]:
        """Tokens that the lease pins, and whether they come before the request may run."""
        blocks = 0 if self.lease is None else len(self.lease)
        return blocks * block_tokens, blocks > 0 and not self.in_step

    def decline(self) -> None:
        """It is not worth its load: give back what was found, and keep the reason."""
        self.drop_lease()
        self.lease = Lease((), (), Miss.SLOWER, lambda holds: None)

    def drop_lease(self) -> None:
        for lease in (self.lease, self.also):
            if lease is not None:
                lease.release()
        self.lease = self.also = None


async def promote(manager: Manager, chain: list[BlockKey], deadline: Mono, start: int) -> Lease:
    """Promote, and release the lease, which a cancelled future would lose. It still says where blocks were found;
    `match` pins when the request may run."""
    with await manager.promote(chain, deadline, start) as lease:
        return lease
