"""`make gpu-check` cannot run here; its parts run in tiny sizes, its supervision survives what a device may do to a
process, and its table judges figures that are given to it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from headless_driver import HeadlessDriver

from kvtier.kernels.method import Table

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    from gpu import rows as gpu_rows

    return gpu_rows.read(path)


class Event:
    """torch.cuda.Event of a device that reaches it at the sixth look."""

    cuda_event, asked = 88, 0

    def __init__(self, **_: bool) -> None: ...
    def record(self) -> None: ...

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 5

    def elapsed_time(self, other: Event) -> float:
        return 3.0


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_transfer_part_runs(tmp_path: Path) -> None:
    from gpu import rows as gpu_rows
    from gpu import transfer as gpu_transfer

    gpu_transfer.measure("cpu", gpu_rows.Rows(tmp_path / "rows", 30.0), tiny=True)
    rows = rows_of(tmp_path / "rows")
    assert not any("error" in row or "skipped" in row for row in rows.values())
    cells = [row for row in rows.values() if "fragment" in row and "store" in row]
    assert len(cells) == 3 and all(cell[way] > 0 for cell in cells for way in ("store", "load", "both"))


def test_the_transfer_part_runs_over_a_stand_in_for_the_driver(
    libcuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it does on a GPU alone: registering, calibration, kernels, events, streams."""
    import torch
    from gpu import rows as gpu_rows
    from gpu import transfer as gpu_transfer

    class Stream:
        cuda_stream = 77

    libcuda.fake_reset(1, 0, 0)
    empty = torch.empty
    monkeypatch.setattr(gpu_transfer, "CudaDriver", lambda ordinal: HeadlessDriver(ordinal, library=libcuda))
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    for name, stand_in in {"Stream": Stream, "Event": Event, "current_device": lambda: 0, "synchronize": list}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("kvtier.kernels.calibration._CELL_BYTES", 4 << 20)
    bench = gpu_transfer.Bench("cpu", 4 << 20, cuda=True)
    gpu_transfer.sweep(bench, gpu_rows.Rows(tmp_path / "rows", 100.0), tiny=True)
    bench.close()
    rows = rows_of(tmp_path / "rows")
    assert not any("error" in row or "skipped" in row for row in rows.values()), rows
    assert {"calibration_s", "methods", "pin_gb_s"} <= rows["start-up"].keys()
    assert sorted(row["method"] for row in rows.values() if "store" in row and "method" in row) == [
        "auto", "auto", "auto", "direct", "dma", "staged",
    ]  # fmt: skip
    assert rows["GEMM beside 4 KiB × 16, auto"]["copied_gb_s"] > 0
    assert rows["loop, 4 KiB × 16"]["memcpy_async_per_fragment"] > 0


def test_what_time_does_not_allow_is_named(tmp_path: Path) -> None:
    from gpu import rows as gpu_rows
    from gpu import transfer as gpu_transfer

    gpu_transfer.measure("cpu", gpu_rows.Rows(tmp_path / "rows", 0.0), tiny=True)
    assert {row.get("skipped") for row in rows_of(tmp_path / "rows").values()} == {"no time left"}


def test_the_kernels_that_a_sanitizer_will_watch_run(libcuda: ctypes.CDLL, tmp_path: Path) -> None:
    from gpu import rows as gpu_rows
    from gpu import sanitized as gpu_sanitized

    class Streaming(gpu_sanitized.Streaming, HeadlessDriver):
        pass

    libcuda.fake_reset(1, 0, 0)
    rows = gpu_rows.Rows(tmp_path / "rows", 60.0)
    gpu_sanitized.measure("cuda", rows, tiny=False, opened=lambda: Streaming(0, library=libcuda))
    found = rows_of(tmp_path / "rows")
    assert len(found) == 8 and all(row.get("passed") for row in found.values())
    assert libcuda.fake_calls().decode().split().count("cuLaunchKernel") >= 32


def test_copies_beside_other_work_run_over_the_stand_in(
    libcuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from gpu import busy as gpu_busy
    from gpu import rows as gpu_rows
    from gpu import transfer as gpu_transfer

    libcuda.fake_reset(1, 0, 0)
    monkeypatch.setattr(gpu_transfer, "CudaDriver", lambda ordinal: HeadlessDriver(ordinal, library=libcuda))
    monkeypatch.setattr(gpu_transfer, "calibrate", lambda *args, **options: Table("stand-in", {}))
    monkeypatch.setattr(gpu_busy, "_OTHER", "import sys; print('registered', flush=True); sys.stdin.read()")
    fakes = {"Event": Event, "current_device": lambda: 0, "synchronize": list, "_sleep": lambda cycles: None}
    for name, stand_in in fakes.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("kvtier.kernels.calibration._CELL_BYTES", 4 << 20)
    bench = gpu_transfer.Bench("cpu", 4 << 20, cuda=True)
    bench.graphs = False
    gpu_busy.sweep(bench, gpu_rows.Rows(tmp_path / "rows", 100.0), tiny=True)
    rows = rows_of(tmp_path / "rows")
    assert not any("error" in row for row in rows.values()), rows
    skipped = {name for name, row in rows.items() if "skipped" in row}
    assert skipped <= {"page-locking, hugetlb pages", "page-locking, transparent huge pages", "two processes under MPS"}
    assert rows["loads behind a long kernel, staged, by the pump"]["submit_ms"] > 0
    assert rows["decode beside 16 KiB, direct"]["copied_gb_s"] > 0 and rows["calibration beside a kernel"]["cells"] > 0
    assert rows["page-locking, 4 KiB pages"]["pin_gb_s"] > 0 and rows["one memfd, two processes"]["passed"]


MPS = """#!{python}
import sys
from pathlib import Path
from types import SimpleNamespace
orders = Path({folder!r}, "orders")
said = " ".join(sys.argv[1:]) + sys.stdin.read().strip()
with orders.open("a") as file:
    print(said, file=file)
if said == "get_server_list":
    print({servers!r})
sys.exit({code} if said == "-d" else 0)
"""


def mps_control(folder: Path, monkeypatch: pytest.MonkeyPatch, servers: str = "4711", code: int = 0) -> Path:
    """A stand-in for the control program; the file of the orders that it gets."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(MPS.format(python=sys.executable, folder=str(folder), servers=servers, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "orders"


SMALL = {"blocks": 4, "block_bytes": 4096, "rounds": 2}


@pytest.mark.long
def test_two_processes_under_mps_compare_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import mps

    mps_control(tmp_path, monkeypatch)
    row = mps.two_clients("cpu", **SMALL)
    assert row["passed"] and row["gb_s"] > 0
    monkeypatch.setattr(mps, "CLIENT", mps.CLIENT.replace("pool[:] = wanted", "pool[:] = wanted + 1"))
    with pytest.raises(RuntimeError, match="wrong 2"):
        mps.two_clients("cpu", **SMALL)


def test_the_row_under_mps_judges_its_clients_and_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import mps
    from gpu.rows import Skip

    orders = mps_control(tmp_path, monkeypatch)
    monkeypatch.setattr(mps, "CLIENT", "print('wrong 0 gb_s 2.0')")
    assert mps.two_clients("cpu", **SMALL) == {"passed": True, "gb_s": 4.0}
    assert orders.read_text().splitlines() == ["-d", "get_server_list", "quit"]
    monkeypatch.setattr(mps, "CLIENT", "print('wrong 1 gb_s 2.0')")
    with pytest.raises(RuntimeError, match="wrong 1"):
        mps.two_clients("cpu", **SMALL)
    mps_control(tmp_path, monkeypatch, servers="")
    with pytest.raises(RuntimeError, match="no clients"):
        mps.two_clients("cpu", **SMALL)
    assert orders.read_text().endswith("quit\n"), "ended whatever went wrong"
    mps_control(tmp_path, monkeypatch, code=1)
    with pytest.raises(Skip, match="MPS does not start"):
        mps.two_clients("cpu", **SMALL)


def test_a_prefix_is_measured_where_it_fits() -> None:
    from gpu import ttft as gpu_ttft

    assert gpu_ttft.lengths_for(80 << 30)[-1] == 65536 and gpu_ttft.lengths_for(141 << 30)[-1] == 131072


WITHOUT_OTHERS = """
import runpy, sys
from importlib.machinery import PathFinder

refused = set(sys.argv[3].split(","))

class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in refused else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
import kvtier, kvtier.connectors.transformers
from kvtier.config import Config
from kvtier.testing import sample_namespace
config = Config.parse({"tiers": {"g2": {"capacity": "8MiB"}, "g3": {"path": sys.argv[1], "capacity": "4GiB"}}})
kvtier.open(config, sample_namespace(4096)).close()
for file in ("conftest.py", "kernels/conftest.py", "kernels/test_gpu.py"):
    runpy.run_path(f"{sys.argv[2]}/{file}")
"""
"""Of modules in no package but the standard library's, kvtier's and those that are allowed."""


def test_the_wheels_hold_all_that_the_parts_import(tmp_path: Path) -> None:
    """kvtier's connector and cache, and the GPU tests, are imported where there are no packages but torch, NumPy,
    transformers, the wheels, and what comes with one of these."""
    text = (BENCHMARKS.parent / "Makefile").read_text().partition("gpu-wheels: $(BASE)")[2].partition("\n\n")[0]
    covered, open_ = {"kvtier"}, [*text.rpartition("constraints.txt ")[2].split(), "torch", "numpy", "transformers"]
    assert "pytest" in open_
    while open_:
        name = canonical(re.split(r"[^A-Za-z0-9_.-]", open_.pop(), maxsplit=1)[0])
        if name in covered:
            continue
        covered.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        open_ += [need for need in needs if "extra ==" not in need]

    def imported(*others: str) -> subprocess.CompletedProcess[str]:
        allowed = covered - set(others)
        refused = [one for one, owners in packages_distributions().items() if not {*map(canonical, owners)} & allowed]
        words = [sys.executable, "-c", WITHOUT_OTHERS, str(tmp_path), str(BENCHMARKS.parent / "tests")]
        return subprocess.run([*words, ",".join(refused)], capture_output=True, text=True, timeout=120)

    done = imported()
    assert done.returncode == 0, done.stderr
    assert "No module named 'hypothesis'" in imported("hypothesis").stderr, "the control"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_first_token_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import rows as gpu_rows
    from gpu import ttft as gpu_ttft

    monkeypatch.chdir(tmp_path)
    gpu_ttft.measure("cpu", gpu_rows.Rows(tmp_path / "rows", 200.0), tiny=True)
    rows = rows_of(tmp_path / "rows").values()
    assert [row["tokens"] for row in rows] == [64, 128]
    assert all(row["g2_s"] > 0 and row["g3_s"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "rows"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_engines_part_runs(tmp_path: Path) -> None:
    """In vLLM for the CPU, without graphs: the same engine process, connector and questions."""
    pytest.importorskip("vllm")
    command = [sys.executable, str(BENCHMARKS / "gpu" / "check.py"), "--smoke", "--part", "vllm"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = [*command, "--rows", str(tmp_path / "rows"), "--budget", "600"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = rows_of(tmp_path / "rows").values()
    assert row["tokens"] == 192 and min(row["computed_s"], row["own_s"], row["g2_s"]) > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "rows"]


def test_the_engine_on_a_cpu_does_not_ask_for_most_of_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM wants 92 % of it free, unless it is told another share, and does not start beside anything large."""
    from gpu import engine as gpu_engine

    asked: dict[str, Any] = {}
    fake = SimpleNamespace(LLM=asked.update, SamplingParams=lambda **given: None)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    bench = gpu_engine.Bench("cpu", tmp_path, tiny=True)
    monkeypatch.setattr(bench, "_model", lambda: 4096)
    bench._engine()
    assert asked["gpu_memory_utilization"] <= 0.2 and "compilation_config" not in asked


def test_without_vllm_its_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import engine as gpu_engine
    from gpu import rows as gpu_rows

    monkeypatch.setitem(sys.modules, "vllm", None)
    gpu_engine.measure("cuda", gpu_rows.Rows(tmp_path / "rows", 60.0), tiny=True)
    (row,) = rows_of(tmp_path / "rows").values()
    assert "vLLM cannot be imported" in row["skipped"]
    from gpu import check as gpu_check

    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    monkeypatch.setattr(
        gpu_check,
        "run_parts",
        lambda paths, *_: [gpu_rows.append(p, {"name": n, "passed": True}) for n, p in paths.items()],
    )
    assert gpu_check.run_all(tmp_path / "out", True, ["transfer", "vllm"]) == 0
    results = json.loads((tmp_path / "out" / "gpu-check-smoke.json").read_text())["results"]
    assert list(results["parts"]) == ["transfer"] and results["environment"]["vllm"] == "not installed; not checked"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_runs_in_tiny_sizes_and_keeps_what_it_has_when_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu" / "check.py"), "--smoke", "--results", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu-check-smoke.json").read_text())["results"]
    parts = ["tests", "transfer", "busy", "vllm", "ttft", "hybrid", "sanitizer"]
    assert results["complete"] and list(results["parts"]) == parts
    assert all(results["parts"].values()) and "first token" in done.stdout
    process = subprocess.Popen([*command, "--only", "transfer"], env=environ, stdout=subprocess.PIPE, text=True)
    path, deadline = tmp_path / "gpu-check-smoke.json", time.monotonic() + 60
    path.unlink()
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "interrupted" in said
    assert not json.loads(path.read_text())["results"]["complete"]


# ── supervision ─────────────────────────────────────────────────────────────────────────────────────────────────────

CHILD = """
import argparse, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from gpu.rows import Rows, Skip
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=Path)
parser.add_argument("--budget", type=float)
options = parser.parse_args()
rows = Rows(options.rows, options.budget)
def wrong():
    os.system("echo an engine tells why")
    raise RuntimeError("a byte was wrong")
def absent(): raise Skip("not here")
rows.run("first", lambda: {"figure": 1})
rows.run("wrong", wrong)
rows.run("absent", absent)
rows.run("crash", lambda: os._exit(7))
rows.run("hang", lambda: time.sleep(60))
rows.run("last", lambda: {"figure": 2})
"""


def child(folder: Path, source: str) -> list[str]:
    path = folder / "child.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{source}")
    return [sys.executable, str(path)]


def test_an_error_a_crash_and_a_hang_cost_their_own_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import rows as gpu_rows

    monkeypatch.setattr(gpu_rows, "ROW_LIMIT_S", 2.0)
    changes: list[int] = []
    gpu_rows.supervise(child(tmp_path, CHILD), tmp_path / "rows", 60.0, lambda: changes.append(1))
    rows = rows_of(tmp_path / "rows")
    assert list(rows) == ["first", "wrong", "absent", "crash", "hang", "last"]
    assert rows["first"]["figure"] == 1 and rows["last"]["figure"] == 2 and rows["absent"]["skipped"] == "not here"
    assert rows["wrong"]["error"] == "RuntimeError: a byte was wrong" and "Traceback" in rows["wrong"]["detail"]
    assert rows["wrong"]["detail"].endswith("an engine tells why\n")
    assert "code 7" in rows["crash"]["error"] and "within 2 s" in rows["hang"]["error"]
    assert changes


def test_a_part_ends_with_its_time_and_says_what_was_under_way(tmp_path: Path) -> None:
    from gpu import rows as gpu_rows

    started = time.monotonic()
    source = CHILD.replace("os._exit(7)", "time.sleep(60)")
    gpu_rows.supervise(child(tmp_path, source), tmp_path / "rows", 7.0)
    assert time.monotonic() - started < 20
    rows = rows_of(tmp_path / "rows")
    assert "time of this part" in rows["crash"]["error"] and "last" not in rows


@pytest.mark.parametrize("source", ["raise SystemExit('no such module')", "import os; os._exit(3)"])
def test_a_part_that_cannot_start_is_tried_once(tmp_path: Path, source: str) -> None:
    from gpu import rows as gpu_rows

    gpu_rows.supervise(child(tmp_path, source), tmp_path / "rows", 60.0)
    rows = rows_of(tmp_path / "rows")
    assert list(rows) == ["the process"] and "ended with code" in rows["the process"]["error"]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"name": "one", "figure": 1}\n{"name": "two", "fig')
    assert list(rows_of(tmp_path / "rows")) == ["one"]
    assert rows_of(tmp_path / "nothing") == {}


def test_without_a_device_nothing_is_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from gpu import check as gpu_check

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_check.run_all(tmp_path, False, list(gpu_check.BUDGETS)) == 2
    said = capsys.readouterr().out
    assert "no CUDA device here" in said and "Nothing was run" in said and not list(tmp_path.iterdir())


def test_an_interpreter_without_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's python3, which `make gpu-check` takes unless it is told of another, mostly has none."""
    from gpu import check as gpu_check

    (tmp_path / "torch.py").write_text("raise ImportError('nothing here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    why = gpu_check.environment(smoke=False)["why"]
    assert sys.executable in why and "no torch (nothing here)" in why and "GPU_PYTHON" in why


def test_its_parts_fit_into_nine_minutes() -> None:
    from gpu import check as gpu_check

    assert sum(gpu_check.BUDGETS.values()) <= gpu_check.TOTAL_S <= 535


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def parts(fraction: float) -> dict[str, list[dict[str, Any]]]:
    """A run in which everything reaches `fraction` of what is asked."""
    speeds = {"store": 55.0, "load": 55.0, "both": 100.0}
    cells = [
        {"name": f"{fragment} {method}", "fragment": fragment, "count": count, "method": method}
        | {"submit_us": 0.4 / fraction}
        | {way: value * fraction for way, value in speeds.items()}
        for fragment, count, method in ((8192, 65536, "auto"), (1 << 20, 256, "auto"), (8192, 4096, "dma"))
    ]
    return {
        "tests": [{"name": "test_bytes[one]", "passed": True}, {"name": "test_bytes[two]", "passed": True}],
        "sanitizer": [{"name": "halves, direct", "passed": True}],
        "busy": [{"name": "loads behind a long kernel", "way": "pump", "submit_ms": 4.0 / fraction}],
        "transfer": [
            {"name": "ceiling", **speeds},
            {"name": "start-up", "calibration_s": 1.5},
            *cells,
            {"name": "GEMM beside x", "slowdown": 0.015 / fraction, "copied_gb_s": 90.0},
            {"name": "loop, 16 KiB × 4096", "torch_per_fragment": 2.0},
            {"name": "later", "skipped": "no time left"},
        ],
        "ttft": [
            {"name": "prefix of 32768 tokens", "tokens": 32768, "recompute_s": 2.0, "g2_s": 0.15 / fraction}
            | {"g2_speedup": 13.0 * fraction, "g3_s": 1.0, "g3_speedup": 2.0},
            {"name": "prefix of 131072 tokens", "skipped": "no time left"},
        ],
    }


@pytest.mark.parametrize(("fraction", "met"), [(1.0, True), (0.5, False)])
def test_the_table_compares_with_the_targets(fraction: float, met: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu import table as gpu_table

    lines = gpu_table.table(parts(fraction))
    judged = [goal for _, _, goal in lines if "met" in goal or "MISSED" in goal]
    assert len(judged) == 9 and all(goal.startswith("met") is met for goal in judged)
    assert ("bytes", "2 of 2", "ok") in lines
    gpu_table.print_table(lines)
    assert capsys.readouterr().out.count("no time left") == 2
    assert gpu_table.failures(parts(fraction)) == [], "a target that was missed is no failure"


def test_what_broke_fails_and_what_must_be_proved_may_not_be_left_out() -> None:
    from gpu import table as gpu_table

    results = parts(1.0)
    results["tests"][1] = {"name": "test_bytes[two]", "error": "E   assert 1 == 2"}
    results["transfer"][2] = {"name": "8 KiB", "error": "RuntimeError: out of memory"}
    lines = gpu_table.table(results)
    assert ("test_bytes[two]", "E   assert 1 == 2", "FAILED") in lines
    assert ("8 KiB", "RuntimeError: out of memory", "FAILED") in lines
    assert gpu_table.failures(results) == ["tests: test_bytes[two]", "transfer: 8 KiB"]
    skipped = {"tests": [{"name": "test_bytes", "skipped": "no CUDA device"}]}
    assert gpu_table.failures(skipped) == ["tests: not run (no CUDA device)"]
    assert gpu_table.failures(skipped, ["tests"])[0] == "tests: test_bytes"
    half = {"ttft": [{"name": "8k", "tokens": 8192}, {"name": "128k", "skipped": "no space"}], "busy": []}
    assert gpu_table.failures(half) == ["busy: not run (no rows)"], "one row that ran is enough"
    assert gpu_table.table({"tests": []}) == [("nothing", "no row was finished", "")]


def results_of(fraction: float) -> dict[str, Any]:
    about = {"gpu": f"<Card {fraction}>", "torch": "2"}
    return {"environment": about, "complete": True, "seconds": 3.0, "parts": parts(fraction)}


def test_the_page_has_the_table_and_no_markup_of_others() -> None:
    from gpu import page as gpu_page

    text = gpu_page.page(results_of(0.5), ["ttft: not run (no <torch>)"])
    assert "&lt;Card 0.5&gt;" in text and "no &lt;torch&gt;" in text and "<Card" not in text
    assert text.count("MISSED") == 9 and "<script" not in text and "http" not in text
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")


def test_two_results_are_compared_by_figure(tmp_path: Path) -> None:
    from gpu import compare as gpu_compare

    old, new = results_of(1.0), results_of(0.5)
    new["parts"]["transfer"][1] = {"name": "start-up", "error": "RuntimeError: no"}
    lines = gpu_compare.compare(old, new)
    assert ("gpu", "<Card 1.0> → <Card 0.5>", "") in lines and ("torch", "2", "") in lines
    assert ("transfer, 8192 auto: load", "55 → 27.5", "-50.0%") in lines
    assert ("transfer, start-up", "ran → error", "") in lines
    assert next(change for *_, change in lines if change) == "+100.0%", "the largest first"
    path = tmp_path / "gpu-check.json"
    path.write_text(json.dumps({"results": old}))
    assert gpu_compare.compare(gpu_compare.load(path), old)[0] == ("gpu", "<Card 1.0>", "")
    path.write_text("{}")
    with pytest.raises(ValueError, match="no results of gpu-check"):
        gpu_compare.load(path)


def test_a_file_that_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu import check as gpu_check

    good, other, text = tmp_path / "good.json", tmp_path / "other.json", tmp_path / "gpu-check.html"
    good.write_text(json.dumps({"results": results_of(1.0)}))
    other.write_text("{}")
    text.write_text("<html>")
    assert gpu_check.compared(good, good) == 0
    shapes = [
        "[" * 9999,
        "[]",
        *(json.dumps({"results": one}) for one in (None, 5, "parts", {"parts": []}, {"parts": {}})),
    ]
    shapes.append(json.dumps({"results": {"environment": {}, "parts": {"transfer": [{}]}}}))
    others = [tmp_path / f"shape-{number}.json" for number in range(len(shapes))]
    for place, shape in zip(others, shapes, strict=True):
        place.write_text(shape)
    for bad in (other, text, tmp_path / "absent.json", *others):
        capsys.readouterr()
        assert gpu_check.compared(good, bad) == 2
        assert bad.name in capsys.readouterr().out
