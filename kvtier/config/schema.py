"""The configuration: one YAML file, frozen values, every key documented, every error explained.

    cfg = Config.load("kvtier.yaml")      cfg = Config.parse({"version": 1, "tiers": {…}})

Sizes are written `64GiB` (or bytes), times `24h`, rates `500MiB/s`. `${NAME}` takes secrets and paths from the
environment, and KVTIER_… variables replace single keys of a file (`kvtier.config.environment`). This is the one place
that reads the environment. Every error is a ConfigError that names the full key, the value and the remedy, in a file
also its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, model_validator

from kvtier.config.environment import is_secret, override, substitute
from kvtier.config.explain import explain, located
from kvtier.config.strict_yaml import TEXT_BYTES_MAX, read_marked
from kvtier.config.values import (
    PRICES,
    CountOrAuto,
    Duration,
    Endurance,
    File,
    Folder,
    Key,
    Paths,
    Plugin,
    Prices,
    Rate,
    Secret,
    Size,
    Socket,
    Url,
    Version,
)
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.keyring import Keyring
from kvtier.retention.terms import BUILTIN, Depth, Terms
from kvtier.units import format_size, shorten

G2_CAPACITY_DEFAULT = 256 << 20
G3_CAPACITY_MIN = 4096
"""The smallest slot. A store is cut to a smaller capacity at its next start: a forgotten unit is not to empty it."""

NAME_CHARS_MAX = 32
CLASSES_MAX = 64
_SECTIONS = ("tiers", "offload", "retention", "deadlines", "security", "log", "trace")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_SHOWN_OPTIONS = frozenset({"anon", "endpoint", "endpoint_url", "region", "region_name", "skip_signature", "use_ssl"})
_HIDDEN = "**********"


class _Section(BaseModel):
    """A frozen mapping of known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class G1(_Section):
    """The GPU's block pool, where kvtier owns it."""

    blocks: int = Field(default=1024, ge=1, le=2**31, description="Blocks in the pool; unused where an engine owns G1.")


class G2(_Section):
    """The arena in host RAM."""

    capacity: Size = Field(default=G2_CAPACITY_DEFAULT, description="RAM for blocks, all ranks of a manager together.")


class G3(_Section):
    """The local SSD. Absent: the tier is off."""

    path: Paths = Field(description="Directory, or a list of them on several devices. Created if its parent exists.")
    capacity: Size = Field(description="Upper bound of the bytes on disk, over all paths together.")
    write_rate: Rate | None = Field(default=None, description="Upper bound of the write rate; none: the disk's.")
    write_budget: Endurance | None = Field(default=None, description="Drive writes per day: multiples of `capacity`.")

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if self.capacity < G3_CAPACITY_MIN:
            raise InvalidRequest(
                f".capacity: {self.capacity} bytes is less than {format_size(G3_CAPACITY_MIN)}; write a unit, such as "
                f"{shorten(self.capacity)}GiB"
            )
        return self


class G4(_Section):
    """Object storage, shared by every replica. Absent: the tier is off."""

    url: Url = Field(description="Any fsspec URL with a prefix of its own: s3://, az://, gs://, file://, memory://.")
    client: Literal["auto", "s3fs", "obstore"] = Field(
        default="auto", description="For s3://, az:// and gs://; auto: obstore if installed."
    )
    stride: CountOrAuto = Field(default="auto", description="Blocks per object; auto: about 32 MiB.")
    options: dict[str, Any] = Field(default={}, repr=False, description="Options of the client; ${NAME} is allowed.")
    compression: Literal["none", "lossless"] = Field(
        default="none", description="lossless: code 16-bit floats, a third fewer bytes for a second of CPU per GB."
    )
    concurrency: int = Field(default=8, ge=1, le=1024, description="Requests in flight at once.")
    read_rate: Rate | None = Field(default=None, description="Upper bound of the read rate; none: no bound.")
    write_rate: Rate | None = Field(default=None, description="Upper bound of the write rate; none: no bound.")
    prices: Prices = Field(
        default=PRICES, description="List prices in dollars: put and get per 1,000 requests, gb_month per GB and month."
    )

    @field_serializer("options")
    def _redact(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: _redacted(key, value) for key, value in options.items()}


class Tiers(_Section):
    """Where blocks may live."""

    g1: G1 = Field(default=G1(), description="GPU block pool.")
    g2: G2 = Field(default=G2(), description="Host RAM.")
    g3: G3 | None = Field(default=None, description="Local SSD.")
    g4: G4 | None = Field(default=None, description="Object storage.")


class Offload(_Section):
    """When blocks are copied out of G1, and which below G2."""

    mode: Literal["auto", "lazy", "eager"] = Field(
        default="auto",
        description="lazy: just ahead of reuse; eager: at once; auto: lazy where kvtier owns G1, else by age.",
    )
    spill_ahead: CountOrAuto = Field(default="auto", description="Copied slots to keep ahead of reuse.")
    dirty_max_age: Duration = Field(default=5.0, description="Age at which a confirmed block is copied at the latest.")
    store_threshold: int = Field(
        default=1, ge=1, le=1000, description="Requests for a block before it is written below G2."
    )
    min_prefix: int = Field(default=0, ge=0, le=2**31, description="Prompts of fewer tokens are not written below G2.")
    copy_by: Literal["auto", "dma", "direct", "staged"] = Field(
        default="auto", description="GPU copies by copy engine, by kernel, or by kernel and staging; auto: as measured."
    )


class RetentionClass(_Section):
    """How long and how deep blocks of this class may live."""

    ttl: Duration | None = Field(default=None, description="Idle time after which a block expires; every use renews.")
    max_age: Duration | None = Field(default=None, description="Age at which a block expires; never renewed.")
    guarantee: bool = Field(default=False, description="Reserve its bytes until ttl ends.")
    ceiling: Literal["g1", "g2", "g3", "g4"] = Field(default="g4", description="Deepest tier it may be copied to.")
    priority: int = Field(default=50, ge=0, le=100, description="Higher is evicted later.")
    isolate: bool = Field(default=False, description="Do not share blocks with other classes.")

    @model_validator(mode="after")
    def _guarantee_ends(self) -> Self:
        if self.guarantee and self.ttl is None:
            raise InvalidRequest(".guarantee: needs a ttl, or its bytes stay reserved for ever; set one, such as 1h")
        return self

    def terms(self, name: str) -> Terms:
        """The class as `Terms`. Pure."""
        ceiling = Depth[self.ceiling.upper()]
        return Terms(name, self.ttl, self.max_age, self.guarantee, ceiling, self.priority, self.isolate)


class Retention(_Section):
    """Retention classes beside the built-in in_memory, 5m, 1h and 24h."""

    default: str = Field(default="24h", description="Class of requests without one.")
    classes: dict[str, RetentionClass] = Field(default={}, description="Own classes by name.")
    quota: float | None = Field(
        default=None, gt=0, le=1, examples=[0.5], description="Share of G2 and of G3 per scope at most; none: all."
    )
    reserved: float = Field(
        default=0.5, gt=0, le=1, description="Share of a tier that guarantees and named pins may reserve at most."
    )
    hints: float = Field(
        default=0.5, ge=0, le=1, description="Share of what may be reserved that one tenant's requests may keep or pin."
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name in self.classes:
            if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
                raise InvalidRequest(
                    f".classes: {shorten(name)} is not a name of 1 … {NAME_CHARS_MAX} of A-Z a-z 0-9 _ . -"
                )
            if name in BUILTIN:
                raise InvalidRequest(f".classes: {name} is built in; give the class a name of its own")
        if len(self.classes) > CLASSES_MAX:
            raise InvalidRequest(f".classes: {len(self.classes)} given, at most {CLASSES_MAX} are allowed")
        known = sorted({*BUILTIN, *self.classes})
        if self.default not in known:
            raise InvalidRequest(f".default: {shorten(self.default)} is not a class; known: {', '.join(known)}")
        return self


class Deadlines(_Section):
    """The longest wait of each call. A block that is not there in time is a miss."""

    lookup: Duration = Field(default=0.2, description="Looking a prefix up.")
    get: Duration = Field(default=10.0, description="Reading a prefix, unless the call has its own deadline.")
    put: Duration = Field(default=10.0, description="Waiting for space in the queue, in put(wait=True).")
    flush: Duration = Field(default=60.0, description="Making accepted blocks durable.")
    close: Duration = Field(default=30.0, description="Flushing and closing every tier.")


class Security(_Section):
    """Sharing of blocks between tenants, and the keys that prove who wrote what is stored."""

    scope_secret: Secret | None = Field(default=None, description="Key of the scope digest, equal on all replicas.")
    salt: Literal["shared", "deny"] = Field(
        default="shared", description="Requests without a salt: they share blocks with each other, or are not cached."
    )
    key_file: File | None = Field(
        default=None, description="File of keys with mode 0600; none of the three: local trust."
    )
    key: Key | None = Field(default=None, description="One key of 64 hexadecimal digits, as ${NAME}.")
    kms: Plugin | None = Field(default=None, description="Plug-in that fetches the keys.")
    data_keys: Folder | None = Field(
        default=None,
        description="Directory of tenants' wrapped keys, shared by replicas; set: G3 and G4 encrypt.",
    )
    purge: Literal["available", "strict"] = Field(
        default="available",
        description="While the bucket cannot be asked for purges: serve from G2 and G3, or from no tier.",
    )
    purge_bound: Duration = Field(
        default=60.0, description="strict: nothing is served later than this after a purge of it."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("key_file", "key", "kms") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f".{given[1]}: {given[0]} is given, too; keys come from one place")
        if self.data_keys is not None and not given:
            raise InvalidRequest(".data_keys: needs a key that wraps them; set key_file, key or kms")
        return self


class Log(_Section):
    """kvtier's log lines in this process."""

    level: Literal["auto", "debug", "info", "warning", "error"] = Field(
        default="auto", description="The least that is logged; auto: what the application has set."
    )
    format: Literal["auto", "json"] = Field(
        default="auto", description="json: one object a line on standard error; auto: the application's handlers."
    )


class Tracing(_Section):
    """What a running cache tells of its requests."""

    socket: Socket | None = Field(
        default=None,
        description="Unix socket for `kvtier trace record`, `explain`, `reload`, one per engine; none: there is none.",
    )
    spans: bool = Field(default=False, description="OpenTelemetry spans of look-ups, plans and transfers.")


class Config(_Section):
    """kvtier's configuration. Frozen; repr and dumps never show a secret."""

    version: Version = Field(default=1, description="Version of this file's format.")
    tiers: Tiers = Field(default=Tiers(), description="Where blocks may live.")
    offload: Offload = Field(default=Offload(), description="When blocks are copied out of G1.")
    retention: Retention = Field(default=Retention(), description="How long blocks live.")
    policy: Literal["auto", "lru", "gapduel"] = Field(default="auto", description="Eviction policy.")
    deadlines: Deadlines = Field(default=Deadlines(), description="The longest wait of each call.")
    security: Security = Field(default=Security(), description="Who may share blocks.")
    log: Log = Field(default=Log(), description="Log lines.")
    trace: Tracing = Field(default=Tracing(), description="What is told of requests.")
    weights: Literal["auto", "full"] = Field(
        default="auto",
        description="Fingerprint of the weights: by hub commit or samples of every tensor, or by all bytes.",
    )
    keep_on_reset: bool = Field(default=False, description="Serve old blocks after an engine announced new weights.")

    @model_validator(mode="after")
    def _strict_has_a_log(self) -> Self:
        if self.security.purge == "strict" and self.tiers.g4 is None:
            raise InvalidRequest(".security.purge: strict needs tiers.g4, where the purge log is")
        return self

    @classmethod
    def load(
        cls, path: str | Path, environ: Mapping[str, str] | None = None, absent: dict[str, str] | None = None
    ) -> Config:
        """From a YAML file, with the KVTIER_… variables of `environ` (default: the process's) over it. Reads the file.
        With `absent`, secrets whose variables are not set are stand-ins, and go there: key → variable; such a value is
        for looking at only. Raises ConfigError that begins with the file and line, or the variable."""
        name = str(path) if len(str(path)) <= 256 else shorten(str(path))
        try:
            with open(path, "rb") as file:
                # One byte past the bound is enough to know that the file is too long.
                text = file.read(TEXT_BYTES_MAX + 1)
        except (OSError, ValueError) as wrong:
            reason = getattr(wrong, "strerror", None) or wrong
            raise ConfigError(f"the configuration {name} cannot be read: {reason}") from wrong
        raw, lines = read_marked(text, name)
        if not raw:
            raise ConfigError(f"{name}: is empty; write at least `version: 1` and tiers (`kvtier init` writes a file)")
        return cls._overridden(raw, environ, {key: f"{name}:{line}" for key, line in lines.items()}, name, absent)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """The built-in defaults, with the KVTIER_… variables of `environ` (default: the process's) over them. Raises
        ConfigError."""
        return cls._overridden({}, environ, {}, "")

    @classmethod
    def parse(cls, raw: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
        """From plain values, as YAML would give them. Reads `environ` for `${NAME}` alone. Raises ConfigError."""
        return cls._parsed(raw, os.environ if environ is None else environ, str)

    @classmethod
    def _overridden(
        cls,
        raw: Mapping[str, Any],
        environ: Mapping[str, str] | None,
        places: dict[str, str],
        name: str,
        absent: dict[str, str] | None = None,
    ) -> Config:
        environ = os.environ if environ is None else environ
        sections = {key: key in _SECTIONS for key in cls.model_fields if key != "version"}
        values, given = override(raw, environ, sections)
        return cls._parsed(values, environ, lambda fault: located(fault, {**places, **given}, name), absent)

    @classmethod
    def _parsed(
        cls,
        raw: Mapping[str, Any],
        environ: Mapping[str, str],
        place: Callable[[str], str],
        absent: dict[str, str] | None = None,
    ) -> Config:
        """`place` says of a fault, which begins with its key, also where that is."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"a configuration is a mapping of keys, got {type(raw).__name__}")
        try:
            values = substitute(raw, "", environ, absent)
        except ConfigError as wrong:
            raise ConfigError(place(str(wrong))) from None
        try:
            return cls.model_validate(values)
        except ValidationError as wrong:
            raise ConfigError(explain(wrong, cls, is_secret, place)) from None

    def terms(self) -> tuple[Terms, ...]:
        """All retention classes: the built-in ones, then the configuration's own. Pure."""
        return (*BUILTIN.values(), *(c.terms(name) for name, c in self.retention.classes.items()))

    @property
    def scope_secret(self) -> bytes:
        """Key of the scope digest; empty if none is set."""
        secret = self.security.scope_secret
        return secret.get_secret_value().encode() if secret else b""

    def keyring(self) -> Keyring:
        """The keys of `security`, read now; without any, those that everybody knows. Raises ConfigError."""
        from kvtier.config import key_file

        security = self.security
        if security.key_file is not None:
            return key_file.read_key_file(security.key_file)
        if security.key is not None:
            return key_file.key_of_secret(security.key.get_secret_value())
        return key_file.ask_plugin(security.kms) if security.kms is not None else Keyring.public()


def config_file() -> str:
    """Path of the YAML file of connectors that are given none: the environment variable KVTIER_CONFIG; "" for none."""
    return os.environ.get("KVTIER_CONFIG", "")


def kms_file() -> str:
    """Path of the key file that AWS KMS opens: the environment variable KVTIER_KMS_FILE; "" for none."""
    return os.environ.get("KVTIER_KMS_FILE", "")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """kvtier's folder below the user's caches (XDG base directories): measurements of this machine's devices, a model
    for the demo. Reads `environ` (default: the process's). None for a user without one."""
    environ = os.environ if environ is None else environ
    caches = Path(environ.get("XDG_CACHE_HOME") or "")
    if not caches.is_absolute():
        caches = Path(environ.get("HOME") or "") / ".cache"
    return caches / "kvtier" if caches.is_absolute() else None


def _redacted(key: str, value: Any) -> Any:
    """A name does not tell whether an option is a credential: only what cannot be one is shown."""
    if isinstance(value, dict):
        return {k: _redacted(k, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_redacted(key, v) for v in value]
    shown = value is None or isinstance(value, bool)
    harmless = key in _SHOWN_OPTIONS and isinstance(value, str | int | float) and "@" not in str(value)
    return value if shown or harmless else _HIDDEN
