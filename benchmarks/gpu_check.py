"""Everything that needs a GPU, in one command of at most eight minutes: right bytes first, then how fast.

    make gpu-check      needs CUDA, torch, CuPy, numpy, pytest with pytest-timeout, and for its last part transformers;
                        no network, and no installed kvtier

Prints a table last and writes benchmarks/results/gpu-check.json. Exit code 1 when a byte was wrong or a part broke;
a missed target is shown as such and does not fail. `--smoke` runs what a CPU can of it, in tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtier.bench.record import record, save

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "kernels" / "test_gpu.py"
TOTAL_S = 470.0
KIB, MIB = 1 << 10, 1 << 20
# Seconds each part may take; what one leaves over, the next has in addition.
BUDGETS = {"tests": 170.0, "sanitizer": 80.0, "transfer": 110.0, "ttft": 90.0}
Row = tuple[str, str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: shows that the parts run")
    parser.add_argument("--part", choices=["transfer", "ttft"], help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        module = importlib.import_module(f"gpu_{options.part}")
        figures = module.measure("cpu" if options.smoke else "cuda", options.budget, tiny=options.smoke)
        options.into.write_text(json.dumps(figures))
        return 0
    return run_all(options.results, options.smoke)


def run_all(folder: Path, smoke: bool) -> int:
    started = time.monotonic()
    results: dict[str, Any] = {"environment": environment()}
    if not smoke and not results["environment"].get("gpu"):
        print("gpu-check: no CUDA device here. Nothing was run.")
        return 2
    owed = 0.0
    for name, budget in BUDGETS.items():
        begun = time.monotonic()
        allowed = min(budget + owed, TOTAL_S - (begun - started))
        print(f"gpu-check: {name}, up to {allowed:.0f} s", flush=True)
        if name in ("tests", "sanitizer"):
            results[name] = {"ok": True, "skipped": "on a CPU"} if smoke else CHECKS[name](allowed)
        else:
            results[name] = measure_part(name, allowed, smoke)
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        owed = max(0.0, allowed - results[name]["seconds"])
    entry = record("gpu-check-smoke" if smoke else "gpu-check", ["make", "gpu-check"], results)
    path = save(entry, folder)
    print_table([*correctness(results), *speed(results), *first_token(results)])
    print(f"written to {path}, {time.monotonic() - started:.0f} s in all")
    return 0 if all(results[name].get("ok") for name in BUDGETS) else 1


def environment() -> dict[str, Any]:
    """Versions, and the device if there is one."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    try:
        found["cupy"] = importlib.import_module("cupy").__version__
    except ImportError as error:
        found["cupy"] = f"absent: {error}"
    if torch.cuda.is_available():
        from kvtier.kernels.driver import CudaDriver

        driver = CudaDriver(torch.cuda.current_device())
        found |= {"gpu": driver.name, "batch_copy": driver.has_batch, "cuda": torch.version.cuda}
    return found


def run_tests(seconds: float) -> dict[str, Any]:
    return pytest_run([sys.executable], ["-m", "gpu"], seconds)


def run_sanitizer(seconds: float) -> dict[str, Any]:
    """The layouts of an odd size under compute-sanitizer's memcheck, where the tool is there and takes the device."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return {"ok": True, "skipped": "compute-sanitizer is not installed"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5", sys.executable]
    done = pytest_run(command, ["-k", "every_layout and halves and (direct or staged)"], seconds)
    if "Device not supported" in done["tail"]:
        return {"ok": True, "skipped": "compute-sanitizer does not support this device or its virtualisation"}
    return done


CHECKS = {"tests": run_tests, "sanitizer": run_sanitizer}


def pytest_run(command: list[str], choice: list[str], seconds: float) -> dict[str, Any]:
    command = [*command, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider", *choice]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, seconds), cwd=HERE.parent, check=False
        )
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        return {"ok": False, "summary": f"not done within {seconds:.0f} s", "tail": text[-4000:]}
    lines = (done.stdout + done.stderr).strip().splitlines()
    summary = next(
        (line for line in reversed(lines) if " passed" in line or " failed" in line), lines[-1] if lines else ""
    )
    if done.returncode:
        print("\n".join(lines[-60:]), flush=True)
    passed = done.returncode == 0 and " passed" in summary
    return {"ok": passed, "summary": summary.strip("= "), "tail": "\n".join(lines)[-4000:]}


def measure_part(name: str, seconds: float, smoke: bool) -> dict[str, Any]:
    """In a process of its own, so that a crash of one part leaves the others' figures."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / "gpu_check.py"), "--part", name, "--into", str(into)]
        command += ["--budget", str(seconds * 0.7), *(["--smoke"] if smoke else [])]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False, env=dict(os.environ)
            )
            if done.returncode == 0:
                return {"ok": True} | json.loads(into.read_text())
            text = done.stderr
        except subprocess.TimeoutExpired as error:
            text = f"not done within {seconds:.0f} s\n" + (error.stderr or b"").decode(errors="replace")
    print(text[-3000:], flush=True)
    return {"ok": False, "error": text[-3000:]}


def correctness(results: dict[str, Any]) -> list[Row]:
    def said(part: dict[str, Any]) -> str:
        return part.get("skipped") or part.get("summary", "")

    return [
        (label, said(results[name]), "ok" if results[name]["ok"] else "FAILED")
        for label, name in (
            ("bytes, ordering, cancellation, memory", "tests"),
            ("compute-sanitizer memcheck", "sanitizer"),
        )
    ]


def speed(results: dict[str, Any]) -> list[Row]:
    part = results["transfer"]
    if not part["ok"]:
        return [broken("transfer", part)]
    ceiling, cells = part["ceiling_gb_s"], [cell for cell in part["cells"] if cell["method"] == "auto"]
    rows: list[Row] = [
        ("one big pinned copy (GB/s)", " ".join(f"{way} {value:.1f}" for way, value in ceiling.items()), "")
    ]

    def worst(way: str, low: int, high: int, share: float, gb_s: float) -> Row | None:
        there = [c for c in cells if low <= c["fragment"] <= high and c["fragment"] * c["count"] >= 64 * MIB]
        if not there:
            return None
        cell = min(there, key=lambda each: each[way])
        fraction = cell[way] / ceiling[way]
        what = f"{low // KIB} … {high // KIB} KiB, {way}, worst"
        seen = f"{cell[way]:.1f} GB/s, {fraction:.0%}, {cell['fragment'] // KIB} KiB × {cell['count']}"
        goal = f"≥ {share:.0%}" + (f", ≥ {gb_s:.0f} GB/s" if gb_s else "")
        return (what, seen, verdict(fraction >= share and cell[way] >= gb_s, goal))

    wanted = [worst(way, 256 * KIB, 4 * MIB, 0.9, 50.0) for way in ("store", "load")]
    wanted += [worst("both", 256 * KIB, 4 * MIB, 0.0, 80.0)]
    wanted += [worst(way, 8 * KIB, 32 * KIB, 0.8, 0.0) for way in ("store", "load")]
    rows += [row for row in wanted if row is not None]
    submits = [c["submit_us"] for c in part["cells"] if c["method"] == "dma" and c["count"] >= 4096]
    if submits:
        rows.append(("CPU per descriptor, worst", f"{max(submits):.2f} µs", verdict(max(submits) <= 0.5, "≤ 0.5 µs")))
    for name, slowdown in part["gemm_slowdown"].items():
        rows.append((f"GEMM beside {name}", f"{slowdown:+.1%}", verdict(slowdown <= 0.02, "≤ 2 %")))
    for naive in part["naive"]:
        figures = ", ".join(f"{key} {value:.1f}" for key, value in naive.items() if key not in ("fragment", "count"))
        rows.append((f"loop, {naive['fragment'] // KIB} KiB × {naive['count']} (GB/s)", figures, ""))
    if not part["complete"]:
        rows.append(("sweep", "ended early: no time left", ""))
    return rows


def first_token(results: dict[str, Any]) -> list[Row]:
    part = results["ttft"]
    if not part["ok"]:
        return [
            ("first token", part["error"].strip().splitlines()[-1] if part["error"].strip() else "crashed", "FAILED")
        ]
    if "skipped" in part:
        return [("first token", part["skipped"], "")]
    rows: list[Row] = []
    for each in part["lengths"]:
        label = f"first token, prefix of {each['tokens']}"
        if "skipped" in each:
            rows.append((label, each["skipped"], ""))
            continue
        seen = f"computed {each['recompute_s']:.3f} s, G2 {each['g2_s']:.3f} s ({each['g2_speedup']:.1f}×)"
        if "disk_s" in each:
            seen += f", disk {each['disk_s']:.3f} s ({each['disk_speedup']:.1f}×)"
        goal = verdict(each["g2_speedup"] >= 10, "≥ 10× from G2") if each["tokens"] == 32768 else ""
        rows.append((label, seen, goal))
    return rows


def broken(what: str, part: dict[str, Any]) -> Row:
    lines = part["error"].strip().splitlines()
    return (what, lines[-1] if lines else "crashed", "FAILED")


def verdict(met: bool, goal: str) -> str:
    return f"{'met' if met else 'MISSED'} ({goal})"


def print_table(rows: list[Row]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    print()
    for what, seen, goal in rows:
        print(f"{what:<{widths[0]}}  {seen:<{widths[1]}}  {goal}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
