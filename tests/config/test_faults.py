"""What a wrong configuration gives: ConfigError, naming the key, quickly, whatever it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import Config
from kvtier.config.explain import known_keys
from kvtier.config.strict_yaml import read_document
from kvtier.errors import ConfigError

SECONDS_MAX = 0.5
MEGABYTE = "x" * 1_000_000


def load(raw: Any) -> str:
    """Parse values that must be refused within the time allowed; returns the message."""
    return refused(lambda: Config.parse(raw, {}))


def refuse(text: str | bytes) -> str:
    """Like `load`, from a document."""
    return refused(lambda: Config.parse(read_document(text), {}))


def refused(attempt: Callable[[], object]) -> str:
    seconds = []
    # The best of three: a garbage collection of what other tests left is not the parser's.
    for _ in range(3):
        begin = time.process_time()
        with pytest.raises(ConfigError) as caught:
            attempt()
        seconds.append(time.process_time() - begin)
        if seconds[-1] < SECONDS_MAX:
            break
    assert min(seconds) < SECONDS_MAX
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def nested(key: str, value: object) -> dict[str, Any]:
    """`a.b.c` and a value as nested mappings."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("tiers.g3.write_rat", "tiers.g3.write_rate"),
        ("tiers.g2.capacty", "tiers.g2.capacity"),
        ("tier", "tiers"),
        ("tiers.g5", "tiers.g4"),
        ("polcy", "policy"),
        ("capacity", "tiers.g2.capacity"),
        ("dirty_max_age", "offload.dirty_max_age"),
        ("retention.classes.mine.tll", "retention.classes.mine.ttl"),
        ("security.secret", "security.scope_secret"),
        ("completely_else", "known here: deadlines, keep_on_reset"),
    ],
)
def test_an_unknown_key_is_named_with_its_nearest(key: str, nearest: str) -> None:
    message = load(nested(key, {"path": "/x"} if key == "tiers.g5" else 1))
    assert message.startswith(f"{key}: unknown key")
    assert nearest in message


WRONG = [float("nan"), float("-inf"), -1, "-1", MEGABYTE, [], {"a": 1}, "\0", "⁂", 10**400, b"x", "${HOME}"]
FREE = {("tiers.g3.path", 3), ("tiers.g3.path", 8)}  # odd names, but names of directories


@pytest.mark.parametrize(
    ("key", "index"),
    [(k, i) for k in known_keys(Config) if k != "tiers.g4.options" for i in range(len(WRONG)) if (k, i) not in FREE],
)
def test_a_wrong_value_names_its_key(key: str, index: int) -> None:
    full = key.replace("*", "own")
    message = load(nested(full, WRONG[index]))
    # The other members of a section may be missing too; the key at fault is named among them.
    assert full in message
    assert "x" * 200 not in message


@pytest.mark.parametrize(
    ("key", "value", "example"),
    [
        ("tiers.g2.capacity", "lots", "64GiB"),
        ("tiers.g2.capacity", "64 GigaBytes", "64GiB"),
        ("deadlines.get", "soon", "24h"),
        ("deadlines.get", 5, "24h"),
        ("tiers.g3.write_rate", "500MiB", "500MiB/s"),
        ("tiers.g3.write_budget", "3", "3DWPD"),
        ("tiers.g4.url", "bucket/prefix", "s3://bucket/prefix"),
        ("tiers.g4.url", "s3://", "s3://bucket/prefix"),
        ("tiers.g4.url", "s3://bucket/../other", "prefix"),
        ("tiers.g3.path", "~/kvtier", "/nvme/kvtier"),
    ],
)
def test_a_wrong_amount_names_key_value_and_an_example(key: str, value: object, example: str) -> None:
    message = load(nested(key, value))
    assert key in message and example in message and repr(value)[1:-1] in message


def test_credentials_in_a_url_are_refused_without_showing_them() -> None:
    message = load(nested("tiers.g4.url", "s3://user:hushhush@host/bucket"))
    assert message.startswith("tiers.g4.url") and "hushhush" not in message


def test_a_class_may_not_shadow_a_built_in_one() -> None:
    assert "24h is built in" in load({"retention": {"classes": {"24h": {"ttl": "1h"}}}})


def test_a_guarantee_needs_an_end() -> None:
    assert "retention.classes.own.guarantee" in load({"retention": {"classes": {"own": {"guarantee": True}}}})


DOCUMENTS = {
    "alias": ("policy: &a lru\nweights: *a", "policy: anchors and aliases"),
    "laughs": ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "a: anchors and aliases"),
    "merge": ("<<: {policy: lru}", "<<: unknown key"),
    "python tag": ("policy: !!python/object/apply:os.system [echo]", "policy: the tag"),
    "tag": ("tiers: !!set {g1}", "tiers: the tag"),
    "local tag": ("tiers: {g2: {capacity: !size 5}}", "tiers.g2.capacity: the tag"),
    "duplicate": ("policy: lru\npolicy: auto", "policy: the key is given twice"),
    "nested duplicate": ("tiers: {g2: {capacity: 1GiB, capacity: 2GiB}}", "tiers.g2.capacity: the key is given twice"),
    "quoted duplicate": ("policy: lru\n'policy': auto", "policy: the key is given twice"),
    "collection as key": ("{[a, b]: 1}", "a key must be text"),
    "two documents": ("policy: lru\n---\npolicy: auto", "more than one document"),
    "not a mapping": ("- policy", "found list"),
    "a word": ("kvtier", "found str"),
    "broken": ("tiers: {g2: ", "not YAML"),
    "tab": ("tiers:\n\tg2: 1", "line 2"),
    "control character": ("policy: \x01", "not YAML"),
    "not UTF-8": (b"policy: \xff\xfe\xfd", "not YAML"),
    "deep flow": ("a: " + "[" * 5000, "nested deeper"),
    "deep blocks": ("\n".join(" " * i + "a:" for i in range(100)), "nested deeper"),
    "wide": ("a: [" + "1," * 20000 + "]", "more than 10000 values"),
    "many keys": ("\n".join(f"k{i}: 1" for i in range(9000)), "unknown key"),
    "long key": (f"{MEGABYTE[:1000]}: 1", "unknown key"),
    "long quoted key": (f'? "{MEGABYTE}"\n: 1', "xxx"),
    "long value": (f"policy: {MEGABYTE}", "policy: "),
    "long number": (f"tiers: {{g1: {{blocks: {'9' * 1_000_000}}}}}", "tiers.g1.blocks"),
    "long size": (f"tiers: {{g2: {{capacity: {'9' * 1_000_000}GiB}}}}", "tiers.g2.capacity"),
    "too long": (f"# {MEGABYTE * 3}", "bytes; a configuration has at most"),
    "nan": ("tiers: {g1: {blocks: .nan}}", "tiers.g1.blocks"),
    "infinite": ("deadlines: {get: .inf}", "deadlines.get"),
    "boolean for a count": ("tiers: {g1: {blocks: true}}", "tiers.g1.blocks"),
    "boolean for a version": ("version: true", "version"),
    "text for a boolean": ("keep_on_reset: 'yes'", "keep_on_reset"),
    "later version": ("version: 2", "version"),
    "look-alike key": ("pοlicy: lru", "unknown key"),
    "environment elsewhere": ("policy: ${HOME}", "policy: '${HOME}' names an environment variable"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_document_is_refused(name: str) -> None:
    text, expected = DOCUMENTS[name]
    assert expected in refuse(text)


def test_a_directory_is_not_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path)


def test_a_cyclic_mapping_ends() -> None:
    cycle: dict[str, Any] = {}
    cycle["tiers"] = cycle
    assert "nested deeper" in load(cycle)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
placed = st.builds(
    lambda key, value: nested(key.replace("*", "own"), value), st.sampled_from(known_keys(Config)), plain
)


QUICK = settings(derandomize=True, max_examples=700, deadline=None)
LONG = settings(max_examples=50_000, deadline=None)

texts = st.text(alphabet=st.sampled_from("abg:{}[],&*!|>-'\"# \n\t%@~?<$1.0x"), max_size=60) | st.binary(max_size=40)


def parses_or_explains(raw: Any) -> None:
    try:
        Config.parse(raw, {})
    except ConfigError as wrong:
        assert str(wrong)


def reads_or_explains(text: str | bytes) -> None:
    try:
        assert isinstance(read_document(text), dict)
    except ConfigError as wrong:
        assert str(wrong)


@QUICK
@given(plain | placed)
def test_any_values_give_a_configuration_or_its_error(raw: Any) -> None:
    parses_or_explains(raw)


@QUICK
@given(texts)
def test_any_text_gives_a_mapping_or_its_error(text: str | bytes) -> None:
    reads_or_explains(text)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(plain | placed)
def test_very_many_values(raw: Any) -> None:
    parses_or_explains(raw)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(texts)
def test_very_many_texts(text: str | bytes) -> None:
    reads_or_explains(text)
