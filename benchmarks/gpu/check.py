"""Everything that needs a GPU, in one command of at most nine minutes: right bytes first, then how fast.

    make gpu-check      needs CUDA, torch, numpy, pytest, and for one part transformers and what kvtier itself
                        needs (`make gpu-wheels` fetches that beforehand); no network

Every check is a row of its own: an error, a crash or a hang costs that row and no other. Prints a table last and writes
benchmarks/results/gpu-check.json, also when it is interrupted, and the table as a page, gpu-check.html. Exit code 1
when something that must hold did not (a wrong byte, a part that broke or of which nothing ran), 2 without a device; a
missed target is shown as such and does not fail. `--smoke` runs what a CPU can of it, in tiny sizes. `--compare OLD
NEW` puts two results side by side.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from gpu.compare import compare, load
from gpu.page import page
from gpu.rows import Row, Rows, append, read, supervise
from gpu.table import errors, failures, print_table, table

from kvtier.bench.record import record, save

HERE = Path(__file__).parent
TOTAL_S = 530.0
# Seconds each part may take; what one leaves over, the next has in addition.
BUDGETS = {
    "tests": 75.0, "transfer": 95.0, "busy": 65.0, "vllm": 105.0, "ttft": 90.0, "hybrid": 45.0, "sanitizer": 55.0,
}  # fmt: skip
MODULES = {
    "tests": ("gpu.kernel_tests", "measure"),
    "transfer": ("gpu.transfer", "measure"),
    "busy": ("gpu.busy", "measure"),
    "vllm": ("gpu.engine", "measure"),
    "ttft": ("gpu.ttft", "measure"),
    "hybrid": ("gpu.hybrid", "measure"),
    "sanitizer": ("gpu.sanitized", "measure"),
    "one by one": ("gpu.sanitized", "one_by_one"),
    "overrun": ("gpu.sanitized", "overrun"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results", help="folder for the JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: shows that the parts run")
    parser.add_argument("--only", choices=list(BUDGETS), action="append", help="this part alone; may be repeated")
    parser.add_argument("--part", choices=list(MODULES), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two results side by side")
    options = parser.parse_args()
    if options.compare:
        return compared(*options.compare)
    if options.part:
        module, function = MODULES[options.part]
        measure = getattr(importlib.import_module(module), function)
        measure("cpu" if options.smoke else "cuda", Rows(options.rows, options.budget), tiny=options.smoke)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    return run_all(options.results, options.smoke, options.only or list(BUDGETS))


def compared(old: Path, new: Path) -> int:
    """Both results side by side; 2 where one is none."""
    try:
        lines = compare(load(old), load(new))
    except (OSError, ValueError) as error:
        print(f"gpu-compare: {error}. OLD and NEW name the gpu-check.json of two runs.")
        return 2
    print_table(lines)
    return 0


def run_all(folder: Path, smoke: bool, parts: list[str]) -> int:
    started = time.monotonic()
    about = environment(smoke)
    if not smoke and "gpu" not in about:
        print(f"gpu-check: {about['why']}. Nothing was run.")
        return 2
    if "vllm" in parts and find_spec("vllm") is None:
        print("gpu-check: vllm: not installed here; its part is left out")
        about["vllm"] = "not installed; not checked"
        parts = [part for part in parts if part != "vllm"]
    name = "gpu-check-smoke" if smoke else "gpu-check"
    head = record(name, ["make", "gpu-check"], {})
    results: dict[str, Any] = {"environment": about, "complete": False, "parts": {}}
    code = 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".gpu-check-") as scratch:
        paths = {part: Path(scratch) / part for part in parts}

        def write() -> Path:
            results["parts"] = {part: list(read(path).values()) for part, path in paths.items()}
            results["seconds"] = round(time.monotonic() - started, 1)
            return save(head | {"results": results}, folder)

        try:
            run_parts(paths, smoke, started, write)
            results["complete"] = True
        except KeyboardInterrupt:
            print("gpu-check: interrupted; what was measured until now:")
        path = write()
        print_table(table(results["parts"]))
        failed = [] if smoke else failures(results["parts"], ("tests",))
        failed = failed or errors(results["parts"])
        shown = path.with_suffix(".html")
        shown.write_text(page(results, failed), encoding="utf-8")
        print("".join(f"\nfailed: {name}" for name in failed))
        print(f"\nwritten to {path} and {shown.name}, {time.monotonic() - started:.0f} s; {len(failed)} failed")
        code = 0 if results["complete"] and not failed else 1
    return code


def run_parts(paths: dict[str, Path], smoke: bool, started: float, write: Callable[[], object]) -> None:
    owed = 0.0
    for part, path in paths.items():
        begun = time.monotonic()
        allowed = min(BUDGETS[part] + owed, TOTAL_S - (begun - started))
        print(f"gpu-check: {part}, up to {allowed:.0f} s", flush=True)
        (sanitize if part == "sanitizer" else measure)(part, path, allowed, smoke, write)
        write()
        for row in read(path).values():
            if "error" in row:
                print(f"--- {part}: {row['name']}: {row['error']}\n{row.get('detail', '')}", flush=True)
        owed = max(0.0, allowed - (time.monotonic() - begun))


def measure(part: str, path: Path, seconds: float, smoke: bool, seen: Callable[[], object]) -> None:
    supervise(command(part, smoke), path, seconds, seen)
    if not read(path):
        append(path, {"name": part, "skipped": "no time left"} if seconds < 10 else {"name": part, "error": "no rows"})


def sanitize(part: str, path: Path, seconds: float, smoke: bool, seen: Callable[[], object]) -> None:
    """The kernels under compute-sanitizer's memcheck, where the tool is there and takes the device; and a control."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if smoke:
        return measure(part, path, seconds, smoke, seen)
    if tool is None:
        return append(path, {"name": "compute-sanitizer", "skipped": "the tool is not installed"})
    checked = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5"]
    output = overrun([*checked, *command("overrun", smoke)], min(60.0, seconds / 2))
    if "Device not supported" in output:
        return append(path, {"name": "compute-sanitizer", "skipped": "the tool does not support this device"})
    if "Invalid __global__ read" in output:
        append(path, {"name": "one byte too far is seen", "passed": True})
    else:
        append(path, {"name": "one byte too far is seen", "error": "it was not reported", "detail": output[-3000:]})
    supervise([*checked, *command(part, smoke)], path, seconds / 2, seen)
    unwritten = [tool, "--tool", "initcheck", "--error-exitcode", "9", "--print-limit", "5"]
    append(path, initcheck(unwritten, command("overrun", smoke), command("one by one", smoke), seconds / 4))


def initcheck(tool: list[str], control: list[str], part: list[str], seconds: float) -> Row:
    """Whether the kernels read nothing that was never written; the control does."""
    row: Row = {"name": "initcheck"}
    if "Uninitialized" not in overrun([*tool, *control], min(30.0, seconds)):
        return row | {"skipped": "it does not report the control, which reads memory that was never written"}
    output = overrun([*tool, *part], seconds)
    if "Uninitialized" in output:
        return row | {"error": "a kernel reads memory that was never written", "detail": output[-3000:]}
    return row | {"passed": True}


def overrun(checked: list[str], seconds: float) -> str:
    """The tool's output on a part, such as the kernel that reads beyond its memory."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*checked, "--rows", str(Path(folder) / "rows"), "--budget", str(seconds)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
        except subprocess.TimeoutExpired as error:
            return f"no end within {seconds:.0f} s\n{(error.stdout or b'').decode(errors='replace')}"
    return done.stdout + done.stderr


def command(part: str, smoke: bool) -> list[str]:
    return [sys.executable, str(HERE / "check.py"), "--part", part, *(["--smoke"] if smoke else [])]


def environment(smoke: bool) -> dict[str, Any]:
    """Versions, and the device if there is one; else `why` there is none. The device is asked in a process of its own,
    so that this one holds no memory of it."""
    about: dict[str, Any] = {"python": sys.version.split()[0]}
    if smoke:
        return about
    try:
        words = [sys.executable, "-c", _ASK]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return about | {"why": "the device did not answer within 90 s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not lines:
        return about | {"why": lines[-1] if lines else f"exit code {done.returncode}"}
    return about | dict(line.split("=", 1) for line in lines if "=" in line)


_ASK = """
import sys
try:
    import torch
except ImportError as error:
    print(f"why={sys.executable} has no torch ({error}); GPU_PYTHON names an interpreter with CUDA torch")
    raise SystemExit
print("torch=" + torch.__version__)
if not torch.cuda.is_available():
    print("why=no CUDA device here, torch " + torch.__version__ + " sees none")
    raise SystemExit
from kvtier.kernels.driver import CudaDriver
from kvtier.kernels.memory import node_cpus
driver = CudaDriver(torch.cuda.current_device())
print("gpu=" + driver.name)
print("cuda=" + str(torch.version.cuda))
print("batch_copy=" + str(driver.has_batch))
print("cpus_near=" + str(len(node_cpus(driver.pci_bus_id()))))
for package in ("transformers", "numpy"):
    try:
        print(package + "=" + __import__(package).__version__)
    except ImportError as error:
        print(package + "=absent: " + str(error).splitlines()[0])
"""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
