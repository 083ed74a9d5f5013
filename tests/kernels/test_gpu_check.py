"""`make gpu-check` cannot run here: its parts run in tiny sizes."""

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
from gpu_benchmarks import BENCHMARKS, rows_of
from headless_driver import HeadlessDriver

from kvtier.kernels.method import Table

pytestmark = pytest.mark.usefixtures("gpu_benchmarks")


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
