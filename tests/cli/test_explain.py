"""`kvtier explain` names the place where two prompts part, the likely cause, and the cost."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.prompt_break import ADVICE, Break, Part, PromptText, compare, read_prompt
from kvtier.errors import InvalidRequest

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": {"a": 1, "b": 2}}}
    for name in ("search", "write", "read")
]
SYSTEM = {"role": "system", "content": "You are a helpful assistant of the company. " * 20}
TURNS = [
    {"role": role, "content": f"{role} says number {place} of many things here. " * 12}
    for place in range(4)
    for role in ("user", "assistant")
]


def body(messages: list[Any], tools: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **({"tools": tools} if tools else {}), **fields}


def broken(earlier: Any, later: Any, **options: Any) -> Break:
    one, two = (
        read_prompt(given if isinstance(given, str) else json.dumps(given), "file") for given in (earlier, later)
    )
    return compare(one, two, **options)


def dated(day: str) -> dict[str, str]:
    return {"role": "system", "content": f"You are an assistant. Today is {day}. Answer briefly. " + "Be kind. " * 30}


FULL = body([SYSTEM, *TURNS], TOOLS)
WRITTEN_ANEW = [*TURNS[:3], {"role": "assistant", "content": "Something else entirely."}, *TURNS[4:]]
STRUCTURED = '{"city": "Paris", "unit": "C", "days": [1, 2]}'
REORDERED = '{"days": [1, 2], "city": "Paris", "unit": "C"}'

CASES: list[tuple[str, Any, Any, str]] = [
    ("none", FULL, body([SYSTEM, *TURNS, {"role": "user", "content": "go on"}], TOOLS), ""),
    ("model", FULL, {**FULL, "model": "n"}, "model"),
    ("tool_order", FULL, body([SYSTEM, *TURNS], [TOOLS[1], TOOLS[0], TOOLS[2]]), "tools"),
    ("changed_tools", FULL, body([SYSTEM, *TURNS], TOOLS[:2]), ""),
    ("unsorted_keys", FULL, body([SYSTEM, *TURNS], [dict(reversed(TOOLS[0].items())), *TOOLS[1:]]), "tools"),
    ("unsorted_keys", body([SYSTEM, {"role": "user", "content": f"result: {STRUCTURED} so?"}]),
     body([SYSTEM, {"role": "user", "content": f"result: {REORDERED} so?"}]), "messages[1] (user)"),
    ("unsorted_keys", f"tool said {STRUCTURED} and", f"tool said {STRUCTURED.replace(', ', ',')} and", "prompt"),
    ("timestamp", body([dated("2026-11-22 10:00:01"), *TURNS]), body([dated("2026-11-22 10:07:44"), *TURNS]),
     "messages[0] (system)"),
    ("timestamp", body([dated("Monday, Nov 22")]), body([dated("Tuesday, Nov 23")]), "messages[0] (system)"),
    ("timestamp", body([dated("1795357204")]), body([dated("1795359999")]), "messages[0] (system)"),
    ("identifier", body([dated("4f9c1c1a-7d2e-4f5b-9f43-2a1f3a9b1c22")]),
     body([dated("aa9c1c1a-7d2e-4f5b-9f43-2a1f3a9b1cff")]), "messages[0] (system)"),
    ("truncated_history", FULL, body([SYSTEM, *TURNS[2:]], TOOLS), "messages[1] (user)"),
    ("truncated_history", "A. " + "first part of it all " * 9 + "second part of it all " * 9,
     "A. " + "second part of it all " * 9, "prompt"),
    ("changed_system", FULL, body([{**SYSTEM, "content": "You are a pirate."}, *TURNS], TOOLS), "messages[0] (system)"),
    ("changed_message", FULL, body([SYSTEM, *WRITTEN_ANEW], TOOLS), "messages[4] (assistant)"),
    ("changed_text", "one two three four", "one two five six", "prompt"),
    ("tokens", list(range(100)), [*range(50), 7, *range(51, 100)], "token 50"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "earlier", "later", "part"), CASES, ids=[f"{at}-{one[0]}" for at, one in enumerate(CASES)]
)
def test_each_cause(cause: str, earlier: Any, later: Any, part: str) -> None:
    found = broken(earlier, later)
    assert (found.cause, found.advice) == (cause, ADVICE[cause]), found
    assert part in found.part
    assert (found.lost_tokens == 0) or cause != "none"


def test_every_cause_has_a_case() -> None:
    assert {cause for cause, *_ in CASES} == ADVICE.keys()


def test_tokens_are_counted_in_whole_blocks() -> None:
    found = broken(list(range(100)), [*range(50), 7, *range(51, 90)], block_tokens=16)
    assert (found.same_tokens, found.earlier_tokens, found.later_tokens) == (50, 100, 90)
    assert found.lost_tokens == 80 - 48, "five blocks could have been reused, and three were"
    found = compare(
        PromptText(read_prompt("abcdefgh", "x").parts), read_prompt("abcdXfgh", "y"),
        lambda prompt: [ord(letter) for letter in prompt.text], 2,
    )  # fmt: skip
    assert (found.same_tokens, found.lost_tokens) == (4, 4)


@pytest.mark.parametrize(("pause", "kept"), [(10, "5m"), (600, "1h"), (7200, "24h"), (1e6, "")])
def test_the_class_that_would_have_kept_it(pause: float, kept: str) -> None:
    assert broken("a", "b", pause_s=pause).kept_by == kept
    found = broken({**FULL, "created": 1000}, {**FULL, "created": 1000 + pause})
    assert (found.pause_s, found.kept_by) == (pause, kept)
    assert broken("a", "b").kept_by is None


def test_what_is_no_prompt_is_named() -> None:
    for wrong in ('{"messages": 7}', '{"input": "x"}', '{"messages": [], "tools": {"a": 1}}'):
        with pytest.raises(InvalidRequest, match=r"^file: "):
            read_prompt(wrong, "file")
    with pytest.raises(InvalidRequest, match="--tokenizer"):
        broken("text", [1, 2, 3])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(body([dated("2026-11-22 10:00:01"), *TURNS], created=0)))
    (tmp_path / "two.json").write_text(json.dumps(body([dated("2026-11-22 10:07:44"), *TURNS], created=463)))
    arguments = ["explain", str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--prefill-rate", "1000", *options])
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    text, _, found = shown.partition("{")
    assert "Likely cause: timestamp" in text and "10:00:01" in text and "the class 1h keeps" in text
    answer = json.loads("{" + found)
    assert answer["cause"] == "timestamp" and answer["lost_seconds"] == answer["lost_tokens"] / 1000
    assert answer["exact"] is False
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(tmp_path / "nothing"), str(tmp_path / "two.json")])
    assert ended.value.code == 2 and "nothing cannot be read: No such file" in capsys.readouterr().err


ODD = {
    "deep": "[" * 4000,
    "a deep body": '{"messages":' + '[{"content":' * 3000 + "1" + "}]" * 3000 + "}",
    "deep behind a text": "x" + "[" * 2000 + "1",
    "no time": '{"prompt":"abc","created":NaN}',
    "no end": '{"prompt":"abd","created":1e999}',
    "a long time": '{"prompt":"abe","created":1' + "0" * 400 + "}",
    "half a pair": r'{"messages":[{"role":"\ud800","content":"a\ud800b"}]}',
    "a terminal's commands": r'{"messages":[{"role":"\u001b[2J","content":"a"}]}',
    "nothing": "",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_compared_or_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").write_text('{"prompt":"abc","created":5}')
    (tmp_path / "odd").write_text(ODD[name])
    (tmp_path / "like").write_text(ODD[name].replace("1", "2").replace("b", "c") + " ")
    for other in ("plain", "like", "odd"):
        for pair in (("odd", other), (other, "odd")):
            with pytest.raises(SystemExit) as ended:
                main(["explain", *(str(tmp_path / one) for one in pair)])
            out, error = capsys.readouterr()
            assert ended.value.code in (0, None) and "defect" not in error and "\x1b" not in out
            out.encode()


def test_a_file_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "/dev/zero", "/dev/zero"])
    assert ended.value.code == 2 and "at most 64 MiB" in capsys.readouterr().err


def test_a_prompt_comes_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "earlier").write_text(json.dumps(FULL))
    later = io.TextIOWrapper(io.BytesIO(json.dumps({**FULL, "model": "n"}).encode()))
    monkeypatch.setattr("sys.stdin", later)
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path / "earlier"), "-", "--json"])
    assert json.loads(capsys.readouterr().out)["cause"] == "model"


@pytest.mark.parametrize("content", [None, 7, {"text": "x"}])
def test_content_of_another_kind_is_compared_as_it_is_written(content: Any) -> None:
    left, right = body([SYSTEM, {"role": "user", "content": content}]), body([SYSTEM, {"role": "user", "content": "y"}])
    assert broken(left, left).cause == "none"
    assert broken(left, right).part == "messages[1] (user)"


def test_a_prompt_that_is_no_object_is_a_text() -> None:
    assert read_prompt('"just words"', "file").parts == (Part("prompt", '"just words"'),)


@pytest.mark.parametrize("there", [False, True])
def test_a_tokenizer_that_is_none_is_named(tmp_path: Path, there: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("earlier", "later"):
        (tmp_path / name).write_text(json.dumps(FULL))
    if there:
        (tmp_path / "checkpoint").mkdir()
    words = [str(tmp_path / "earlier"), str(tmp_path / "later"), "--tokenizer", str(tmp_path / "checkpoint")]
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    assert ended.value.code == 2 and f"--tokenizer {tmp_path}/checkpoint" in capsys.readouterr().err
