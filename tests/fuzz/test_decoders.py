"""No bytes make a decoder do anything but return a value that they stand for, or raise the error that it documents:
in time and memory that grow with their length."""

from __future__ import annotations

import logging
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.support.decoders import DECODERS, ELSEWHERE, Decoder
from tests.fuzz.support.mutations import mutated

ROOT = Path(__file__).parents[2]
QUICK, DEEP = 25, 1000
CPU_S, MEMORY_BYTES, MEMORY_PER_BYTE = 1.0, 16 << 20, 256
READS = re.compile(
    r"\.(b64decode|convert|Decoder|from_bytes|frombuffer|fromhex|iter_unpack|literal_eval|loads|safe_load|unpack|unpack_from)\("
    r"|\b(csv\.reader|json\.load|msgspec\.\w+\.decode|np\.load|pickle\.load|tomllib\.load|yaml\.(compose|load|parse))\("
)

each = pytest.mark.parametrize("decoder", DECODERS, ids=lambda one: one.name)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvtier").setLevel(logging.NOTSET)


def examine(decoder: Decoder, raw: bytes) -> bool:
    """Whether the bytes were decoded."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        value = decoder.read(raw)
        decoded = True
    except decoder.errors:
        decoded = False
    finally:
        passed_s = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert passed_s < CPU_S, f"{decoder.name}: {passed_s:.2f} s for {len(raw)} bytes"
    assert peak < MEMORY_BYTES + MEMORY_PER_BYTE * len(raw), f"{decoder.name}: {peak} bytes for {len(raw)}"
    if decoded and decoder.write is not None:
        assert decoder.write(value) == raw, f"{decoder.name}: reads what it cannot have written"
    return decoded


def fuzz(decoder: Decoder, examples: int) -> None:
    samples = decoder.samples()

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mutated(samples), st.booleans())
    def run(raw: bytes, sealed: bool) -> None:
        examine(decoder, decoder.seal(raw) if sealed and decoder.seal is not None else raw)

    run()


@each
def test_what_was_written_is_read(decoder: Decoder) -> None:
    for raw in decoder.samples():
        assert examine(decoder, raw), f"{decoder.name} reads none of its samples"
        assert decoder.seal is None or decoder.seal(raw) == raw, f"{decoder.name}: another seal than the format's"


@each
def test_changed_bytes_are_a_value_or_the_documented_error(decoder: Decoder) -> None:
    fuzz(decoder, QUICK)


@pytest.mark.long
@pytest.mark.timeout(900)
@each
def test_the_same_with_many_more(decoder: Decoder) -> None:
    fuzz(decoder, DEEP)


def _decoding_modules() -> set[str]:
    """Modules that make values of bytes, without "kvtier."."""
    found = set()
    for folder in ("kvtier", "connectors", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if READS.search(path.read_text()):
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("kvtier."))
    return found


def test_every_module_that_decodes_is_in_the_table() -> None:
    """A new one has a row in DECODERS, or in ELSEWHERE a reason why it needs none."""
    here = {module for decoder in DECODERS for module in decoder.modules}
    modules = _decoding_modules()
    assert modules - here - set(ELSEWHERE) == set(), "decoders that no test feeds with changed bytes"
    assert set(ELSEWHERE) <= modules - here, "these decode no bytes any more, or have a row"
    exists = {module for module in here if (ROOT / "kvtier" / module.replace(".", "/")).with_suffix(".py").exists()
              or (ROOT / module.replace(".", "/")).with_suffix(".py").exists()}  # fmt: skip
    assert here == exists
