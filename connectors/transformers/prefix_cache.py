"""Prefix reuse for Hugging Face transformers: one object between the prompts and `model.generate`.

    with PrefixCache(config, model) as prefixes:
        cache, hit_tokens = prefixes.fetch(input_ids)
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache)
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))

kvtier owns G1 here: a DevicePool on the model's device. A prefix is looked for in G1, then through the manager in
G2 … G4, and what came from below is onboarded. New blocks are confirmed in G1, wait on its dirty list, and are
offloaded ahead of the reuse of their slots.

The cache that `fetch` returns is a copy: the model may grow, crop or drop it. Decoder-only models with full attention
and one row per call; everything that cannot be kept exactly is refused with an InvalidRequest that says why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvtier import cache as byte_cache
from kvtier.clock import Clock, SystemClock
from kvtier.config import Config, cache_folder
from kvtier.connectors.counters import tokens_by_tier
from kvtier.connectors.runs import runs_of
from kvtier.connectors.transformers.model import check_layers, namespace_of, probe
from kvtier.errors import InvalidRequest, TierError
from kvtier.hit import Hit
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import BlockKey, make_keys, scope_of
from kvtier.kernels.engine import cpus_near
from kvtier.manager.closing import Flushed
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth, Terms, resolve
from kvtier.tiers.device.dirty import Dirty
from kvtier.tiers.device.torch_pool import DevicePool, Place
from kvtier.tiers.protocol import Miss, Tier
from kvtier.times import Mono

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

log = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20
_SPILL_AHEAD_FRACTION = 0.25


class PrefixCache:
    """The KV of one model's prompts, over all four tiers. Not thread-safe: one call at a time.

    `name` and `weights` override the identity read from the live model; `tiers` replaces the configured lower tiers.
    After the weights change, open a new one. Raises IdentityError, InvalidRequest or ConfigError for a model or a
    configuration that cannot be served.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        *,
        block_tokens: int = 16,
        name: str | None = None,
        weights: str | None = None,
        clock: Clock | None = None,
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.shape = probe(model)
        self.namespace = namespace_of(model, self.shape, block_tokens, name=name, weights=weights, mode=config.weights)
        self.served: Counter[str] = Counter()  # prompt tokens: by the tier that had them, and "recomputed"
        self.clock = clock or SystemClock()
        self._config = config
        self._lost = False  # a copy did not end; see _lose
        self._classes = config.terms()
        self._fetched: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # cache object → blocks it began with
        blocks, offload = config.tiers.g1.blocks, config.offload
        self.pool = DevicePool(
            blocks,
            self.namespace.block_bytes,
            device=model.device,
            horizon=int(blocks * _SPILL_AHEAD_FRACTION) if offload.spill_ahead == "auto" else offload.spill_ahead,
            dirty_max_age_s=0.0 if offload.mode == "eager" else offload.dirty_max_age,
        )
        self._kv = self.pool.typed(self.shape.dtype, self.shape.block(block_tokens))
        near = [cpus_near(self.pool.rows.device)]
        self.cache = byte_cache.open(config, self.namespace, clock=self.clock, tiers=tiers, near=near)
        self.pool.attach(self.cache.manager.host.arena, offload.copy_by, cache_folder())
        self.pool.on_lost = partial(self.cache.manager.lost, why=Miss.SPILL_LOST)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- the two verbs -----------------------------------------------------------------------------------------

    def fetch(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        retention: str | None = None,
        salt: str | bytes | None = None,
        timeout: float | None = None,
    ) -> tuple[DynamicCache, int]:
        """A cache object that holds the longest known prefix of the prompt, and its length in tokens.

        The length is a multiple of `block_tokens` and at most len(prompt) - 1, since `generate` must have a token left
        to compute. Pass the whole `input_ids` and a mask of ones to `generate`. May wait for lower tiers up to
        `timeout` seconds (deadlines.get); whatever fails or is late there makes the prefix shorter. The cache is the
        caller's. Raises InvalidRequest for a batch, padding or an unknown retention class.
        """
        import torch
        from transformers import DynamicCache

        tokens = self._row(input_ids, attention_mask)
        chain = self._chain(tokens, self._terms(retention), salt)[: (len(tokens) - 1) // self.block_tokens]
        slots = self.pool.pin(chain, self.clock.wall())
        tiers = ["g1"] * len(slots)
        beyond: list[torch.Tensor] = []  # blocks for which G1 has no slot
        try:
            while True:
                with self.cache.get(chain, timeout, start=len(tiers)) as hit:
                    onboarded = self._onboard(chain, len(tiers), hit)
                    slots += onboarded
                    beyond += [self._from_host(block) for block in hit.blocks[len(onboarded) :]]
                    tiers += hit.tiers
                if not len(hit) or hit.miss is not Miss.NO_ROOM:
                    break  # else the prefix is longer than G2, which has space again now
            blocks = torch.cat([self._kv[slots], *beyond]) if beyond else self._kv[slots]
        finally:
            self.pool.free(slots)
        cache = DynamicCache(self._layers(blocks) if len(blocks) else None, config=self.model.config)
        self._fetched[cache] = len(blocks)
        self._account(tiers, len(tokens))
        return cache, len(blocks) * self.block_tokens

    def store(
        self,
        output_ids: torch.Tensor,
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
        retention: str | None = None,
        salt: str | bytes | None = None,
        timeout: float | None = None,
    ) -> int:
        """Keep the full blocks of `cache`, which holds the KV of a prefix of `output_ids`. Returns how many are new.

        Call it when `generate` has returned: its blocks are confirmed then. Copies within the device, and to host RAM
        the blocks that must make space; where that is full, waits for the tiers below up to `timeout` seconds
        (deadlines.put), then stores the head and refuses the rest. Raises InvalidRequest, with nothing stored, for
        padding, for tokens that `generate` may have masked as padding, and for layers or types that blocks cannot be
        cut from.
        """
        tokens = self._row(output_ids, attention_mask)
        if attention_mask is None:
            self._refuse_inferred_padding(output_ids)
        self._check_cache(cache, len(tokens))
        terms = self._terms(retention)
        chain = self._chain(tokens[: cache.get_seq_length()], terms, salt)
        now = self.clock.wall()
        life = Lifetime.of(terms, now)
        dirty_since = self.clock.monotonic() if terms.ceiling > Depth.G1 else None
        known = self.pool.pin(chain, now)
        self.pool.confirm(known, chain, life, dirty_since=dirty_since)
        self.pool.free(known)
        # Blocks that `fetch` took from below and G1 had no slot for are below still: they need not come again.
        first = start = max(len(known), min(self._fetched.get(cache, 0), len(chain)))
        limit = self._config.deadlines.put if timeout is None else timeout
        while start < len(chain) and (count := self._make_space(len(chain) - start, limit)):
            slots = self.pool.allocate(count)
            self._write(slots, cache, start)
            self.pool.confirm(slots, chain, life, first=start, dirty_since=dirty_since)
            self.pool.free(slots)
            start += len(slots)
        self.step()
        return start - first

    def _onboard(self, chain: Sequence[BlockKey], start: int, hit: Hit) -> list[int]:
        """Slots, the caller's, with the leading blocks of `hit`, as many as G1 has space for without a loss."""
        if not self._usable():
            return []
        slots = self.pool.allocate(self._make_space(len(hit), wait_s=0.0))
        places = [(slot.number, slot.generation) for slot in hit.slots[: len(slots)]]

        def late(over: Sequence[tuple[int, Place]], last: bool) -> None:
            self.pool.free([slot for slot, _ in over])

        try:
            arrived = self.pool.copy_in(places, slots, late)
        except TierError as error:
            self._lose(error)
            return []  # the slots are the copy's until it ends: without a name, and not handed out
        whole = _leading(arrived)
        self.pool.free(slots[whole:])
        slots = slots[:whole]
        for depth, (slot, life) in enumerate(zip(slots, hit.lives, strict=False), start):
            self.pool.confirm([slot], chain, life, first=depth)
        return slots

    # --- offload -----------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Copy out what G1 is about to hand out, then what has been dirty for too long, at most 64 MiB of it.

        `store` ends with one; call it when idle, too. Never waits. Returns how many blocks were copied.
        """
        limit = max(1, _STEP_BYTES // self.namespace.block_bytes)
        return self._offload(min(limit, self.cache.manager.queue_space()), self.pool.horizon)

    def flush(self, timeout: float | None = None) -> Flushed:
        """Offload everything that is dirty, then wait until it is as deep as it may go, or the timeout is over."""
        deadline = self.clock.monotonic() + (self._config.deadlines.flush if timeout is None else timeout)
        manager = self.cache.manager
        while self.pool.dirty:
            version = manager.space.version
            if not self._offload(manager.queue_space(), self.pool.blocks) and not self._wait(deadline, version):
                break
        return self.cache.flush(max(0.0, deadline - self.clock.monotonic()))

    def _make_space(self, wanted: int, wait_s: float) -> int:
        """How many slots, at most `wanted`, `allocate` hands out without losing a dirty block.

        Offloads what is in the way as long as the queue below G2 takes it, waiting for that up to `wait_s`.
        """
        manager, deadline = self.cache.manager, self.clock.monotonic() + wait_s
        wanted = min(wanted, self.pool.free_blocks)
        while True:
            version = manager.space.version
            clean = self.pool.clean_ahead(wanted)
            if clean == wanted:
                return clean
            if not self._offload(min(wanted, manager.queue_space()), wanted) and not self._wait(deadline, version):
                return clean

    def _wait(self, deadline: Mono, version: int) -> bool:
        """Until there may be space below that there was not at version `version` of `space`; False at the deadline."""
        if self.clock.monotonic() >= deadline:
            return False
        return self.cache.submit(self.cache.manager.space.wait(deadline, version)).result()

    def _offload(self, limit: int, ahead: int) -> int:
        if not self._usable():
            return 0
        kept = 0
        picked = self.pool.pick(limit, self.clock.monotonic(), ahead=ahead)
        for run in runs_of(picked, attrgetter("chain", "depth")):
            try:
                there = 0 if self._lost else self._offload_run(run)
            except TierError as error:
                self._lose(error)
                continue  # in flight until the copy has ended: it may read these slots yet
            except BaseException:
                self.pool.copies_done(run, again_since=self.clock.monotonic())
                raise
            self.pool.copies_done(run[:there])
            self.pool.copies_done(run[there:], again_since=self.clock.monotonic())
            kept += there
        return kept

    def _lose(self, error: TierError) -> None:
        """The device did not finish a copy: no other is given to it until it has."""
        log.error("%s; blocks stay in G1 until it has", error)
        self._lost = True

    def _usable(self) -> bool:
        """Whether the device takes copies: none was lost, or all that were have ended since."""
        if self._lost and self.pool.recovered():
            log.warning("the device has finished its copies: offloading goes on")
            self._lost = False
        return not self._lost

    def _offload_run(self, run: Sequence[Dirty]) -> int:
        """Copy neighbours of one chain to G2. Returns how many of them, from the first on, are there now."""
        manager, chain, start = self.cache.manager, run[0].chain, run[0].depth
        lives = [self.pool.life(dirty.slot) for dirty in run]
        slots, reached = manager.reserve(chain, start, start + len(run), _terms_of(lives[0]))
        generations = [slot.generation for slot in slots]
        places = [(slot.number, slot.generation) for slot in slots]
        given = dict(zip(places, slots, strict=True))

        def late(over: Sequence[tuple[int, Place]], last: bool) -> None:
            for _, place in over:
                manager.acknowledge(given[place], place[1])
            if last:
                self.pool.copies_done(run, again_since=self.clock.monotonic())

        try:
            arrived = self.pool.copy_out([run[slot.index - start].slot for slot in slots], places, late)
        except BaseException as error:
            manager.abort(slots, generations, in_flight=isinstance(error, TierError))
            raise
        whole = _leading(arrived)
        if whole < len(slots):
            reached = slots[whole].index
            manager.abort(slots[whole:], generations[whole:])
            slots, generations = slots[:whole], generations[:whole]
        for slot in slots:
            life = lives[slot.index - start]
            assert life is not None
            slot.life = life  # as confirmed, not as copied: a spill is no use and no new creation
        manager.commit(chain, slots, generations)
        manager.finish_put(chain[:reached])
        return reached - start

    # --- the rest ----------------------------------------------------------------------------------------------

    def purge(self, salt: str | bytes | None = None) -> int:
        """Drop every block of a salt (None: of requests without one) from every tier and replica, for good."""
        self.pool.purge(self._scope(salt, None))
        return self.cache.purge(salt)

    def stats(self) -> dict[str, Any]:
        """The cache's statistics, with `g1` and the prompt tokens served by tier."""
        g1 = {"blocks": self.pool.resident, "capacity": self.pool.blocks, "dirty": self.pool.dirty,
              "evictions": self.pool.evicted, "spill_lost": self.pool.spill_lost}  # fmt: skip
        return {**self.cache.stats(), "g1": g1, "tokens": dict(self.served)}

    def check(self) -> None:
        """Assert the invariants of every tier."""
        self.pool.check()
        self.cache.check()

    def close(self) -> Flushed:
        """Offload, flush, release everything. Idempotent."""
        if not self.cache.manager.closed:
            self.flush(self._config.deadlines.close)
        self.pool.detach()
        return self.cache.close()

    def _terms(self, retention: str | None) -> Terms:
        return resolve(retention or self._config.retention.default, self._classes)

    def _scope(self, salt: str | bytes | None, terms: Terms | None) -> Any:
        isolated = terms.name if terms is not None and terms.isolate else ""
        return scope_of(salt, isolated=isolated, secret=self._config.scope_secret)

    def _chain(self, tokens: Any, terms: Terms, salt: str | bytes | None) -> tuple[BlockKey, ...]:
        scope = self._scope(salt, terms)
        return tuple(
            make_keys(scope, chain_hashes(chain_root(self.namespace.digest, scope), tokens, self.block_tokens))
        )

    def _account(self, tiers: Sequence[str], tokens: int) -> None:
        self.served.update(tokens_by_tier(tiers, self.block_tokens))
        self.served["recomputed"] += tokens - len(tiers) * self.block_tokens

    def _row(self, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """The token ids of the one row as a NumPy array, after every check of the arguments."""
        if ids.ndim != 2 or ids.shape[0] != 1:
            raise InvalidRequest(f"token ids of shape {tuple(ids.shape)}: pass one row [1, tokens], a batch row by row")
        if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
            raise InvalidRequest("the attention mask must be all ones: KV behind padding is not this prompt's KV")
        return ids[0].cpu().numpy()

    def _refuse_inferred_padding(self, ids: torch.Tensor) -> None:
        pad = getattr(getattr(self.model, "generation_config", None), "pad_token_id", None)
        if pad is not None and bool((ids == pad).any()):
            raise InvalidRequest(
                f"the tokens contain the padding id {pad}, which `generate` masks by default; pass it "
                "attention_mask=torch.ones_like(input_ids), and the mask of the whole output to `store`"
            )

    def _check_cache(self, cache: DynamicCache, tokens: int) -> None:
        check_layers(cache)
        shape = self.shape
        wanted = (1, shape.kv_heads, cache.get_seq_length(), shape.head_size)
        if len(cache.layers) != shape.layers or wanted[2] > tokens:
            raise InvalidRequest(f"{len(cache.layers)} layers of {wanted[2]} tokens, where {tokens} tokens were given")
        for index, layer in enumerate(cache.layers if wanted[2] else ()):
            for tensor in (layer.keys, layer.values):
                if tuple(tensor.shape) != wanted or tensor.dtype != shape.dtype:
                    raise InvalidRequest(
                        f"layer {index} holds {tensor.dtype} {tuple(tensor.shape)}, expected {shape.dtype} {wanted}; "
                        "kvtier casts nothing"
                    )

    # --- tensors -----------------------------------------------------------------------------------------------

    def _write(self, slots: Sequence[int], cache: DynamicCache, start: int) -> None:
        """Cut blocks start … start + len(slots) - 1 out of every layer into `slots`."""
        begin, end = start * self.block_tokens, (start + len(slots)) * self.block_tokens
        for index, layer in enumerate(cache.layers):
            for half, tensor in enumerate((layer.keys, layer.values)):
                heads = tensor[0, :, begin:end]
                cut = heads.reshape(heads.shape[0], len(slots), self.block_tokens, heads.shape[2])
                self._kv[slots, index, half] = cut.transpose(0, 1)

    def _layers(self, blocks: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [1, heads, tokens, dim] of every layer from [blocks, layers, 2, heads, block tokens, dim]."""
        count, layers, _, heads, tokens, size = blocks.shape
        joined = blocks.permute(1, 2, 3, 0, 4, 5).reshape(layers, 2, 1, heads, count * tokens, size)
        return [(layer[0], layer[1]) for layer in joined]

    def _from_host(self, block: memoryview) -> torch.Tensor:
        """One block that G1 has no slot for, straight onto the device, shaped like `_kv[slot : slot + 1]`."""
        import torch

        flat = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(self.pool.rows.device)
        return flat.view(self.shape.dtype).view(1, *self.shape.block(self.block_tokens))


def _leading(arrived: Sequence[bool]) -> int:
    """How many copies arrived before the first that did not."""
    return next((index for index, good in enumerate(arrived) if not good), len(arrived))


def _terms_of(life: Lifetime | None) -> Terms:
    """Terms to add to a block that G2 has already: the widest of the stamps that it carries in G1."""
    assert life is not None
    stamp = max(life.stamps, key=lambda stamp: stamp.ceiling)
    return Terms("offload", ttl=stamp.ttl, max_age=stamp.max_age, ceiling=stamp.ceiling)
