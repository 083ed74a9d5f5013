"""The demo's parts: script, model, reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.demo import real_model, script
from kvtier.demo.job import Job
from kvtier.demo.stage import Act, perform
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


def turn(conversation: str, restored: int, **more: object) -> dict[str, object]:
    return {
        "conversation": conversation, "question": "Why?", "answer": "So.", "prompt_tokens": 96, "served": {"g2": 64,
        "recomputed": 32}, "ttft_hit_ms": 7.0, "ttft_recompute_ms": 70.0, "blocks_restored": restored,
        "bytes_same": True, "tokens_same": True, "gap": 0.0, **more,
    }  # fmt: skip


def end(**more: object) -> dict[str, object]:
    served = {"g1": 0, "g2": 128, "g3": 0, "g4": 0, "recomputed": 64}
    return {"gap": 0.01, "served": served, "block_bytes": 4096, **more}


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: Act, *words: str
) -> tuple[int, str]:
    """The status and output of the command, whose processes report so."""
    second = Act([turn("sea", 4)], end())
    monkeypatch.setattr(
        "kvtier.cli.demo.perform", lambda job, watch: (watch("first", first.turns[0]), (first, second))[1]
    )
    with pytest.raises(SystemExit) as ended:
        main(["demo", *words])
    return int(ended.value.code or 0), " ".join(capsys.readouterr().out.split())


def test_what_was_found_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"full": {"g2": 3}, "window": {}}
    status, told = shown(monkeypatch, capsys, Act([turn("sea", 4), turn("bread", 4)], end(groups=groups)))
    assert status == 0 and "Second process, same store" in told
    assert "128 of 192 prompt tokens were not computed; 8 blocks restored, bytes identical; tokens identical" in told
    assert "full: 3 G2 blocks; window: no blocks" in told
    assert "first token after 7 ms, recomputed 70 ms" in told and "near-tie" not in told


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"bytes_same": False}, "bytes NOT identical"), ({"tokens_same": False}, "tokens NOT identical")],
)
def test_what_differs_is_shown_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: dict[str, object], says: str
) -> None:
    status, told = shown(monkeypatch, capsys, Act([turn("sea", 4, **wrong)], end()))
    assert status == 1 and says in told and "DIFFER" in told


def test_nothing_restored_and_a_tie_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = shown(monkeypatch, capsys, Act([turn("sea", 0, gap=0.001)], end()))
    assert status == 1 and "0 blocks restored, bytes NOT identical" in told, "nothing was proved"
    assert "1 turns part from a full prefill at a near-tie (gap at most 0.001" in told
    assert told.count("first token after") == 1, "of the second process alone"


def test_a_real_talk_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fetched = list[Path]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(real_model, "fetch", fetched.append)
    first = Act([turn("sea", 4), turn("bread", 4)], end())
    status, told = shown(monkeypatch, capsys, first, "--real", "--yes")
    assert status == 0 and fetched == [real_model.folder()]
    assert told.index("sea") < told.index("bread") and "64 in G2 32 computed" in told.replace("So. ", "")
    fetched[0].mkdir(parents=True)
    (fetched[0] / "config.json").touch()
    assert shown(monkeypatch, capsys, first, "--real")[0] == 0 and len(fetched) == 1, "it is there: nobody is asked"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--folder", str(tmp_path / "file" / "work")])
    assert ended.value.code == 2 and "--folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import json; print(json.dumps({'event': 'error', 'message': 'no room'}))", "the first process: no room"),
        ("import sys; sys.exit('went wrong')", "status 1: went wrong"),
        ("pass", "ended with status 0"),
        ("import os; os.write(2, b'\\xff: it went wrong'); os._exit(1)", "status 1: .*: it went wrong"),
    ],
)
def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, program: str, says: str) -> None:
    whole = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **named: whole([sys.executable, "-c", program], **named))
    with pytest.raises(KVTierError, match=says):
        perform(Job(folder="unused", g4="file:///unused"))


def test_modules_of_the_working_directory_are_not_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('of the working directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    job = Job(folder=str(tmp_path), g4=f"file://{tmp_path}/g4", model=str(tmp_path / "none"))
    with pytest.raises(KVTierError, match=r"^the first process: .*none"):
        perform(job)
