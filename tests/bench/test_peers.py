"""What `kvtier bench peers` compares, without an engine: slices, prompts, judging tokens, and a peer that fails."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.peers import contest as contests
from kvtier.bench.peers import sglang as peers_sglang
from kvtier.bench.peers import sglang_engine, vllm_engine
from kvtier.bench.peers import vllm as peers
from kvtier.bench.peers.contest import Contest, PeerFailed, Replay, differences
from kvtier.bench.peers.prompts import BLOCK_TOKENS, PROMPT_BLOCKS_MAX, conversations, prompts_of, reusable, slice_of
from kvtier.bench.peers.rounds import summed
from kvtier.bench.retention.traces import load_trace
from kvtier.errors import ConfigError, InvalidRequest


def test_the_packaged_slice_reuses_as_much_as_the_whole_trace_does() -> None:
    blocks = slice_of(None, 120, 0)
    assert len(blocks) == 120
    share = sum(reusable(blocks)) / sum(min(len(chain), PROMPT_BLOCKS_MAX) for chain in blocks)
    assert 0.35 < share < 0.38, "36.6 % of the published trace's blocks were named before"


def test_prompts_share_exactly_what_their_block_ids_share() -> None:
    first, second, third = prompts_of([[1, 2, 3], [1, 2, 4, 5], [9]])
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS : -1] != second[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]
    assert len(first) == 3 * BLOCK_TOKENS + 1 and len(third) == BLOCK_TOKENS + 1
    assert len(prompts_of([list(range(1000))])[0]) == PROMPT_BLOCKS_MAX * BLOCK_TOKENS + 1


def test_what_could_be_reused() -> None:
    assert reusable([[1, 2, 3], [1, 2, 4], [4, 1], [1, 2, 4, 5]]) == [0, 2, 2, 3]


def test_a_slice_of_a_trace_has_whole_conversations(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * i, "input_length": 600, "output_length": 1, "hash_ids": [0, 1 + i % 7, 100 + i]}
        for i in range(70)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = load_trace(file)
    kept = conversations(trace, 20, seed=1)
    assert len(kept) == 20 and len({tuple(chain[:2]) for chain in kept}) == 2
    assert kept == [chain for chain in kept if chain in [list(r.blocks) for r in trace.requests]]
    assert conversations(trace, 20, seed=1) == kept != conversations(trace, 20, seed=2)


def test_other_tokens_are_wrong_unless_the_best_two_tied() -> None:
    truth, gaps = [[1, 2, 3]] * 4, [[1.0, 1e-5, 1.0]] * 4
    found = [[1, 2, 3], [1, 9, 9], [9, 2, 3], [1, 2]]
    assert differences(found, truth, gaps) == (2, 1)


def test_a_contender_that_cannot_run_says_why_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay(contest: Contest, name: str, more: Any, prompts: Any, margins: bool = False) -> Replay:
        if name == "native":
            raise PeerFailed("the engine ended: no such device")
        count = len(prompts)
        return Replay(1.0, 2.0, 10 * count, 33 * count, [[1]] * count, [0.1] * count, [[1.0]] * count)

    monkeypatch.setattr(peers, "replay", replay)
    contest = Contest(tmp_path, [[1] * 33] * 6, 80, 64, tmp_path, again=2)
    out = peers.compare(contest)
    assert out["native"] == {"not_run": "the engine ended: no such device"}
    assert "--lmcache" in out["lmcache"]["not_run"]
    assert out["kvtier"]["computed_share"] == pytest.approx(10 / 33)
    assert out["kvtier"]["after_restart"]["requests"] == 2 and "after_restart" not in out["nothing"]
    assert all(out[name]["wrong_requests"] == 0 for name in ("nothing", "kvtier", "native+kvtier"))

    def stop(contest: Contest, name: str, more: Any, prompts: Any, margins: bool = False) -> Replay:
        if name == "native":
            raise KeyboardInterrupt
        return replay(contest, name, more, prompts, margins)

    monkeypatch.setattr(peers, "replay", stop)
    out = peers.compare(replace(contest, folder=tmp_path / "again"))
    assert "computed_share" in out["kvtier"] and out["lmcache"] == out["native"] == {"not_run": "interrupted"}
    with pytest.raises(InvalidRequest, match="no-such"):
        peers.compare(contest, ["no-such"])


def test_an_engine_that_dies_is_reported_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers._ENGINE.is_file() and peers_sglang._ENGINE.is_file()
    script = tmp_path / "engine.py"
    said = "RuntimeError: out of luck\nException ignored in: __del__\nAttributeError: at the interpreter's end"
    script.write_text(f"import sys; sys.stdin.read(); sys.exit({said!r})")
    monkeypatch.setattr(peers, "_ENGINE", script)
    with pytest.raises(PeerFailed, match="out of luck"):
        peers.compare(Contest(tmp_path, [[1] * 33], 80, 64, tmp_path))


@pytest.mark.parametrize("options", [{"engine": "llama"}, {"only": "nobody"}])
def test_wrong_options_are_named(options: dict[str, str]) -> None:
    from kvtier.cli.bench.peers import peers as command

    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        command(**options)  # type: ignore[arg-type]


def test_the_command_writes_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier.cli.bench import peers as bench_peers

    def found(share: float, count: int, **more: Any) -> dict[str, Any]:
        return {
            "requests": count, "prompt_tokens": 1000, "computed_prompt_tokens": int(1000 * share),
            "computed_share": share, "ttft_ms_median": 5.0, "ttft_ms_p90": 9.0, "replay_s": 1.0, "start_s": 1.0,
            "wrong_requests": 0, "requests_that_differ_at_a_tie": 0,
            "ttft_s": [0.001 * i for i in range(count)], **more,
        }  # fmt: skip

    def compare(contest: Contest, names: Any) -> dict[str, Any]:
        contest.progress("kvtier", 1)
        return {
            "nothing": found(0.9, len(contest.prompts)),
            "kvtier": found(0.6, len(contest.prompts), after_restart=found(0.5, contest.again)),
            "lmcache": {"not_run": "no such interpreter"},
        }

    monkeypatch.setattr(bench_peers.vllm_peers, "compare", compare)
    monkeypatch.setattr(bench_peers, "make_model", lambda folder: folder)
    bench_peers.peers(folder=tmp_path, requests=40, again=20)
    shown = capsys.readouterr().out
    assert "60.0 %" in shown and "50.0 %" in shown and "lmcache: no such interpreter" in shown
    kept = json.loads((tmp_path / "peers_vllm.json").read_text())["results"]
    resumed = sum(blocks >= 8 for blocks in reusable(slice_of(None, 40, 0)))
    assert kept["slice"]["resumed"] == resumed > 0
    figures = kept["contenders"]["kvtier"]
    assert (
        figures["ttft_ms_median_resumed"] > 0 and "ttft_s" not in figures and "ttft_s" not in figures["after_restart"]
    )
    bench_peers.peers(requests=40, again=20, json=True)
    assert json.loads(capsys.readouterr().out)["results"]["slice"]["requests"] == 40


def test_rounds_turn_go_on_and_are_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was broken off keeps its whole rounds; another slice, commit or set of contenders begins anew."""
    from kvtier.cli.bench import peers as bench_peers

    orders, stopped = list[list[str]](), False

    def compare(contest: Contest, names: Any) -> dict[str, Any]:
        (contest.folder / "disk").mkdir()
        orders.append(list(names))
        figures = {
            "prompt_tokens": 1000, "computed_prompt_tokens": 500, "computed_share": 0.5, "wrong_requests": 0,
            "ttft_ms_median": 10.0 + len(orders), "ttft_s": [0.001] * len(contest.prompts),
        }  # fmt: skip
        stop = {"not_run": "interrupted"}
        return {"without_any_cache": dict(figures), **{name: dict(stop if stopped else figures) for name in names}}

    monkeypatch.setattr(bench_peers.vllm_peers, "compare", compare)
    monkeypatch.setattr(bench_peers, "make_model", lambda folder: folder)
    monkeypatch.setattr(bench_peers, "commit", lambda: "one")
    monkeypatch.setattr("kvtier.bench.record.commit", lambda: "one")

    def run(rounds: int, only: str = "kvtier,native,nothing") -> dict[str, Any]:
        orders.clear()
        bench_peers.peers(folder=tmp_path, requests=40, only=only, rounds=rounds)
        return dict(json.loads((tmp_path / "peers_vllm.json").read_text())["results"])

    run(2)
    assert orders == [["kvtier", "native", "nothing"], ["native", "nothing", "kvtier"]]
    stopped = True
    assert len(run(3)["rounds"]) == 3 and len(orders) == 1
    stopped = False
    found = run(3)
    assert orders == [["nothing", "kvtier", "native"]], "two were whole"
    assert found["contenders"]["kvtier"]["ttft_ms_median"] == 11.0
    assert found["contenders"]["kvtier"]["spread"] == {"ttft_ms_median": [11.0, 12.0]}
    assert "11 (11 to 12)" in capsys.readouterr().out
    run(3)
    assert not orders, "nothing is left to do"
    run(1, only="kvtier")
    assert orders == [["kvtier"]]
    monkeypatch.setattr(bench_peers, "commit", lambda: "another")
    run(1, only="kvtier")
    assert orders == [["kvtier"]]


def test_figures_of_rounds_are_summed_up() -> None:
    one = {"computed": 20, "ms": 3.0, "wrong_requests": 0, "resumed": None, "after_restart": {"ms": 1.0}}
    two = {"computed": 20, "ms": 5.0, "wrong_requests": 2, "resumed": None, "after_restart": {"ms": 2.0}}
    assert summed([one, two]) == {
        "computed": 20, "ms": 4.0, "wrong_requests": 2, "resumed": None, "rounds": 2,
        "after_restart": {"ms": 1.5, "spread": {"ms": [1.0, 2.0]}, "rounds": 2},
        "spread": {"ms": [3.0, 5.0], "wrong_requests": [0, 2]},
    }  # fmt: skip
    assert summed([{"not_run": "why"}, one]) == summed([one]) and summed([{"not_run": "why"}]) == {"not_run": "why"}


def test_sglangs_contenders_differ_only_in_what_lies_below_them(tmp_path: Path) -> None:
    contest = Contest(tmp_path, [[1] * 33], 80, 64, tmp_path)
    told: dict[str, Any] = {}
    for name in peers_sglang.NAMES:
        with peers_sglang._arguments(contest, name, tmp_path / name) as more:
            told[name] = more
    assert told["nothing"] == {}
    assert told["kvtier"]["unified_cache_external_linker_config"]["linker"] == "KVTierLinker"
    file, ours = told["hicache"], told["hicache+kvtier"]
    assert (file["hicache_ratio"], ours["hicache_ratio"]) == (64 / 80, 32 / 80)
    assert {k: v for k, v in file.items() if "backend" not in k and "ratio" not in k} == {
        k: v for k, v in ours.items() if "backend" not in k and "ratio" not in k
    }
    with pytest.raises(InvalidRequest, match="nobody"), peers_sglang._arguments(contest, "nobody", tmp_path):
        pass


class FakeConnector:
    def __init__(self) -> None:
        self.left = 2

    def has_pending_push_work(self) -> bool:
        return self.left > 0


def vllm_stand_in(connector: FakeConnector | None, asked: list[list[int]]) -> SimpleNamespace:
    """The part of vLLM that the benchmark's engine uses: it answers with two tokens, and had one block cached."""

    def step() -> None:
        assert connector is not None
        connector.left -= 1

    core = SimpleNamespace(
        scheduler=SimpleNamespace(connector=connector, has_requests=lambda: False), step_fn=step,
        shutdown=lambda: asked.append([]),
    )  # fmt: skip

    def generate(prompts: list[dict[str, list[int]]], sampling: SimpleNamespace, use_tqdm: bool) -> list[Any]:
        asked.append(prompts[0]["prompt_token_ids"])
        steps = [
            {1: SimpleNamespace(logprob=-0.5), 2: SimpleNamespace(logprob=-2.0)},
            {1: SimpleNamespace(logprob=0.0)},
        ]
        out = SimpleNamespace(token_ids=(5, 6), logprobs=steps if sampling.logprobs else None)
        metrics = SimpleNamespace(first_token_latency=0.25)
        return [SimpleNamespace(outputs=[out], metrics=metrics, num_cached_tokens=16)]

    def counted() -> list[Any]:
        labels = {"source": "local_compute"}
        name = "vllm:prompt_tokens_by_source"
        return [
            SimpleNamespace(name=name, labels=labels, value=float(sum(map(len, asked)))),
            SimpleNamespace(name="vllm:else", labels={}, value=7.0),
        ]

    llm = SimpleNamespace(
        generate=generate, get_metrics=counted,
        llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)),
    )  # fmt: skip
    return SimpleNamespace(LLM=lambda **engine: llm, SamplingParams=lambda **given: SimpleNamespace(**given))


@pytest.mark.parametrize("connected", [False, True])
def test_vllms_engine_reports_each_prompt_and_the_sum(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    reports, asked = list[dict[str, Any]](), list[list[int]]()
    connector = FakeConnector() if connected else None
    job: dict[str, Any] = {"engine": {}, "prompts": [[1] * 32, [2] * 48], "tokens": 2, "margins": connected}
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in(connector, asked))
    monkeypatch.setattr(vllm_engine, "read_job", lambda: (job, lambda **fields: reports.append(fields)))
    vllm_engine.main()
    assert [len(prompt) for prompt in asked] == [40, 32, 48, 0], "a warm-up, the prompts, the end"
    ready, first, second, end = reports
    assert "ready" in ready and end == {"computed": 80.0, "prompted": 80}
    assert first["tokens"] == [5, 6] and first["cached"] == 16 and second["ttft_s"] == 0.25
    assert first["margins"] == ([1.5, math.inf] if connected else [])
    assert connector is None or connector.left == 0, "it stored what it had to, between two prompts"


def test_vllms_engine_takes_prompts_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2]\n[3]\n"))
    assert list(vllm_engine._prompts({"prompts": None})) == [[1, 2], [3]], "until the input ends"
    lines = io.StringIO("go\ngo\nmore\n")
    monkeypatch.setattr("sys.stdin", lines)
    assert list(vllm_engine._prompts({"prompts": [[1], [2]], "in_turn": True})) == [[1], [2]]
    assert lines.read() == "more\n", "a line for each"
    table: dict[str, Any] = {}
    binding = SimpleNamespace(lib=SimpleNamespace(_fntab=table))
    monkeypatch.setattr(vllm_engine, "import_module", {"llvmlite.binding.ffi": binding}.__getitem__)
    monkeypatch.setattr(vllm_engine, "read_job", lambda: ({"engine": {"kv_transfer_config": "LMCache"}}, print))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(ImportError):
        vllm_engine.main()
    assert table == {"__dict__": {}}, "before vLLM was imported"


class SGLangStandIn:
    """The part of SGLang's engine that the benchmark uses. `tokens`: how many come."""

    def __init__(self, tokens: int = 2) -> None:
        self.tokens, self.asked, self.ended = tokens, list[int](), False

    def generate(self, *, input_ids: list[int], sampling_params: Any, stream: bool = False, **_: Any) -> Any:
        self.asked.append(len(input_ids))
        if stream:
            return iter([{"output_ids": [9] * self.tokens, "meta_info": {"cached_tokens": 16}}] * 2)
        return {"meta_info": {"output_top_logprobs": [[[-0.5, 1], [-2.0, 2]], [[0.0, 1]]]}}

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.parametrize("margins", [False, True])
def test_sglangs_engine_reports_each_prompt_and_the_sum(monkeypatch: pytest.MonkeyPatch, margins: bool) -> None:
    reports, engine = list[dict[str, Any]](), SGLangStandIn()
    job = {"engine": {}, "prompts": [[1] * 32, [2] * 48], "tokens": 2, "margins": margins, "settle_s": 0.0}
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=lambda **given: engine))
    monkeypatch.setattr(sglang_engine, "read_job", lambda: (job, lambda **fields: reports.append(fields)))
    sglang_engine.main()
    assert engine.asked == ([40, 32, 32, 48, 48] if margins else [40, 32, 48]) and engine.ended
    assert reports[-1] == {"computed": 48, "prompted": 80}
    assert reports[1]["tokens"] == [9, 9] and reports[2]["margins"] == ([1.5, math.inf] if margins else [])
    engine.tokens = 1
    with pytest.raises(RuntimeError, match="1 tokens came, 2 were asked for"):
        sglang_engine.main()


ENGINE = """import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"ready": 0.5}), flush=True)
for number, prompt in enumerate(job["prompts"]):
    print(json.dumps({"tokens": [1], "ttft_s": 0.1, "cpu_s": 0.2, "margins": [1.0]}), flush=True)
print(json.dumps({"computed": 20, "prompted": 66}), flush=True)
"""


def test_what_an_engine_reports_is_its_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(peers, "_ENGINE", script)
    done = list[tuple[str, int]]()
    contest = Contest(tmp_path, [[1] * 33] * 2, 80, 64, tmp_path, progress=lambda *told: done.append(told))
    found = peers.compare(contest, ["nothing"])
    assert found["nothing"]["computed_prompt_tokens"] == 20 and found["nothing"]["wrong_requests"] == 0
    assert done == [("oracle", 1), ("oracle", 2), ("nothing", 1), ("nothing", 2)]


def test_an_engine_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "engine.py"
    script.write_text("import time; time.sleep(99)")
    monkeypatch.setattr(peers, "_ENGINE", script)
    monkeypatch.setattr(contests, "START_S", 0.05)
    monkeypatch.setattr(contests, "end_process", lambda process, grace_s: (process.kill(), process.wait()))
    with pytest.raises(PeerFailed, match="did not answer for 0 s"):
        peers.compare(Contest(tmp_path, [[1] * 33], 80, 64, tmp_path), ["nothing"])


def test_kvtiers_variants_differ_only_in_when_they_load(tmp_path: Path) -> None:
    contest = Contest(tmp_path, [[1] * 33], 80, 64, tmp_path)
    told: dict[str, Any] = {}
    for name in ("kvtier", *peers.VARIANTS):
        with peers.transfer(contest, name, tmp_path) as more:
            extra = more["kv_transfer_config"]["kv_connector_extra_config"]
            told[name] = extra.get("recompute"), extra.get("in_step_bytes"), more["control"]
    on, off = {"load": True}, {"load": False}
    assert told == {
        "kvtier": (None, None, on), "kvtier always": ("never", None, on), "kvtier between": ("never", 0, on),
        "kvtier never": (None, None, off),
    }  # fmt: skip


@pytest.mark.parametrize("works", [False, True])
def test_lmcaches_server_is_waited_for(tmp_path: Path, works: bool) -> None:
    program = tmp_path / "lmcache"
    listens = "s = socket.create_server(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1]))); time.sleep(99)"
    program.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\n{listens if works else 'sys.exit(chr(110) * 3)'}\n"
    )
    program.chmod(0o700)
    contest = Contest(tmp_path, [[1] * 33], 80, 64, tmp_path, lmcache=tmp_path / "python")
    if works:
        with peers.transfer(contest, "lmcache", tmp_path) as more:
            transfer = more["kv_transfer_config"]
            assert transfer["kv_connector"] == "LMCacheMPConnector" and "kv_connector_module_path" not in transfer
    else:
        with pytest.raises(PeerFailed, match="does not answer: nnn"), peers.transfer(contest, "lmcache", tmp_path):
            pass
