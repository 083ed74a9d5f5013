"""The demo's parts: script, model, reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.demo import script
from kvtier.errors import ConfigError, FormatError, KVTierError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_the_shipped_script_has_four_conversations_of_four_turns() -> None:
    text = script.read()
    assert len(text.system) > 400 and [len(c.turns) for c in text.conversations] == [4] * 4
    assert [len(c.turns) for c in script.read(real=True).conversations] == [4] * 4


@pytest.mark.parametrize("text", ["", "== system\n\nhello", "== someone\n\nhello", "== system\nx\n\n== a\n"])
def test_a_script_without_its_sections_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        script.parse(text)


def test_every_conversation_speaks_as_often_and_returns_in_reverse() -> None:
    order = script.order(4, 4)
    assert sorted(order) == sorted([0, 1, 2, 3] * 4)
    assert order[-4:] == [3, 2, 1, 0] and order[:4] == [0, 0, 1, 1]


def test_a_model_that_ignores_its_prompt_is_refused() -> None:
    from kvtier.demo.model import refuse_deaf

    torch.manual_seed(0)
    usual = transformers.LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.001,
    )  # fmt: skip
    with pytest.raises(KVTierError, match="proves nothing"):
        refuse_deaf(transformers.LlamaForCausalLM(usual).eval())


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    from kvtier.demo.model import load

    with pytest.raises(ConfigError, match="not a directory"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


def test_the_reference_knows_versions_and_no_other_bytes(tmp_path: Path) -> None:
    from kvtier.connectors.transformers.model import KVShape
    from kvtier.demo.reference import Reference

    shape = KVShape(1, 1, 4, torch.float32)
    one, other = Reference(shape, 2), Reference(shape, 2)
    key, first, second = b"k" * 48, b"a" * 64, b"b" * 64
    one.add([key, key], [first, second])
    one.save(tmp_path / "reference.bin")
    other.load(tmp_path / "reference.bin")
    for reference in (one, other):
        assert reference.holds(key, first) and reference.holds(key, second)
        assert not reference.holds(key, b"c" * 64) and not reference.holds(b"x" * 48, first)
    assert one.cut(one.prefix([key], [second], None), 1) == [second]


def test_the_gap_is_taken_where_tokens_first_part() -> None:
    from kvtier.demo.reference import parting_gap

    logits = [torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([[5.0, 4.5, 1.0]])]
    assert parting_gap([1, 0], [1, 0], logits) == 0.0
    assert parting_gap([1, 1], [1, 0], logits) == pytest.approx(0.5)
    assert parting_gap([2, 0], [1, 0], logits) == pytest.approx(2.0)
