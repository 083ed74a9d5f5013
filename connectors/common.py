"""What the engine connectors share: configuration, identity, scope, per-request control.

    settings  = Settings.parse(extra)                 the engine's connector arguments → kvtier.Config and overrides
    namespace = Namespace(model=model_name(…), weights=weights_of(…), …)
    scope     = Scopes(settings.config).of(salt, adapter, control.terms)
    control   = Controls(settings.config).parse(raw)  what one request asked for
    keys      = engine_keys(scope, hashes)            the engine's own block hashes under our scope

Nothing here knows an engine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.block import BlockKey, Scope, make_keys, scope_of
from kvtier.config import Config
from kvtier.errors import ConfigError, IdentityError, InvalidRequest
from kvtier.hashing import HASH_BYTES
from kvtier.namespace import Namespace
from kvtier.terms import Depth, Terms, resolve
from kvtier.units import shorten
from kvtier.weights import fingerprint

log = logging.getLogger(__name__)

_CONTROL_KEYS = ("ceiling", "load", "retention", "store")


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's arguments. `model` and `weights` replace what would be derived; "" derives."""

    config: Config
    model: str = ""
    weights: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], more: Sequence[str] = ()) -> Settings:
        """From the engine's extra configuration: `kvtier_config` (path of the YAML file, or the mapping itself),
        `model`, `weights`; `more` are further keys that the connector reads itself. Reads the file. Raises
        ConfigError, also for a key it does not know."""
        known = {"kvtier_config", "model", "weights", *more}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(f"connector argument {shorten(unknown[0])} is unknown; known: {', '.join(sorted(known))}")
        given = extra.get("kvtier_config")
        if isinstance(given, str):
            config = Config.load(given)
        elif isinstance(given, Mapping):
            config = Config.parse(given)
        else:
            raise ConfigError("connector argument kvtier_config is missing; give the path of kvtier's YAML file")
        texts = {name: extra.get(name, "") for name in ("model", "weights")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ConfigError(f"connector argument {name} must be a text, got {shorten(value)}")
        return cls(config, **texts)


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────


def model_name(model: str, given: str = "") -> str:
    """A logical name: `given`, else a hub id as it is, else the last part of a path. Pure.

    Two replicas that keep one checkpoint at different paths share; the weights' fingerprint tells two checkpoints of
    one name apart.
    """
    if given:
        return given
    looks_like_path = model.startswith(("/", "./", "../", "~")) or Path(model).exists()
    return (Path(model).name or "model") if looks_like_path else model


def weights_of(settings: Settings, model: str, revision: str | None = None) -> str:
    """Fingerprint of the weights that the engine loaded: the operator's id, else of the local directory or of the
    hub snapshot. Reads a few MiB of the files (all of them with `weights: full`). Raises IdentityError."""
    if settings.weights:
        return f"id:{settings.weights}"
    where = Path(model)
    if not where.exists():
        where = _snapshot(model, revision)
    return fingerprint(where, settings.config.weights)


def _snapshot(repo: str, revision: str | None) -> Path:
    """Directory of a hub model that is in the local cache. Never goes to the network."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except Exception as error:  # a foreign library's errors are not part of its contract
        raise IdentityError(f"the weights of {repo!r} cannot be found: {error}; set the argument weights") from error
    if not isinstance(found, str):
        raise IdentityError(
            f"the weights of {repo!r} are neither a directory nor in the hub's local cache; "
            "set the connector argument weights to an id that changes with them"
        )
    return Path(found).parent


def adapter_of(path: str | None) -> bytes:
    """Fingerprint of an adapter's weights for the scope; b"" for none. Reads files. Raises IdentityError."""
    return b"" if not path else fingerprint(path).encode("ascii")


def epoch_after_reset(config: Config, namespace: Namespace) -> Namespace:
    """The namespace after the engine announced new weights in place: a random epoch that no other process shares,
    or, with `keep_on_reset`, the same one."""
    return namespace if config.keep_on_reset else namespace.rotated(secrets.token_hex(8))


def engine_keys(scope: Scope, hashes: Sequence[bytes]) -> list[BlockKey]:
    """An engine's own chain hashes under our scope. Pure. Raises IdentityError unless they have 32 bytes."""
    for digest in hashes:
        if len(digest) != HASH_BYTES:
            raise IdentityError(
                f"the engine's block hashes have {len(digest)} bytes, {HASH_BYTES} are needed: "
                "choose a cryptographic one (sha256_cbor)"
            )
    return make_keys(scope, hashes)


# ── one request ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Control:
    """What one request may do: its terms, and whether it reads from and writes to the tiers at all."""

    terms: Terms
    load: bool = True
    store: bool = True


class Controls:
    """Reads what requests ask for: {"retention": class, "ceiling": "g2" … "g4", "load": bool, "store": bool}."""

    def __init__(self, config: Config) -> None:
        self._classes = config.terms()
        self._default = Control(resolve(config.retention.default, self._classes))

    def parse(self, raw: object) -> Control:
        """Never raises: a request must not fail because of the cache. What cannot be understood is neither read nor
        stored, since its sender may have asked for less than the default keeps; a warning says why."""
        if raw is None:
            return self._default
        try:
            return self._parse(raw)
        except InvalidRequest as error:
            log.warning("a request is not cached: %s", error)
            return replace(self._default, load=False, store=False)

    def _parse(self, raw: object) -> Control:
        if not isinstance(raw, Mapping):
            raise InvalidRequest(f"kvtier parameters must be a mapping, got {shorten(raw)}")
        if unknown := [key for key in raw if key not in _CONTROL_KEYS]:
            raise InvalidRequest(f"kvtier.{shorten(unknown[0])} is unknown; known: {', '.join(_CONTROL_KEYS)}")
        terms, name = self._default.terms, raw.get("retention")
        if name is not None:
            if not isinstance(name, str):
                raise InvalidRequest(f"kvtier.retention must name a class, got {shorten(name)}")
            terms = resolve(name, self._classes)
        ceiling = raw.get("ceiling")
        if ceiling is not None:
            if ceiling not in ("g2", "g3", "g4"):
                raise InvalidRequest(f"kvtier.ceiling must be g2, g3 or g4, got {shorten(ceiling)}")
            terms = replace(terms, ceiling=min(terms.ceiling, Depth[ceiling.upper()]))
        switches = {name: raw.get(name, True) for name in ("load", "store")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise InvalidRequest(f"kvtier.{name} must be true or false, got {shorten(value)}")
        return Control(terms, **switches)


class Scopes:
    """Who may share a request's blocks. Pure."""

    def __init__(self, config: Config) -> None:
        self._secret = config.scope_secret
        self._deny = config.security.salt == "deny"

    def of(self, salt: str | bytes | None, adapter: bytes, terms: Terms) -> Scope | None:
        """The scope, or None where the request may not be cached at all (no salt, and `security.salt: deny`)."""
        if salt is None and self._deny:
            return None
        return scope_of(salt, adapter, terms.name if terms.isolate else "", secret=self._secret)
