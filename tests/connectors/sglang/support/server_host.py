"""`python -m sglang.launch_server` on a CPU: the same command line, after the stand-ins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("HF_HUB_OFFLINE", "1"), ("TORCHDYNAMO_DISABLE", "1")):
    os.environ.setdefault(name, value)

from kvtier.testing import sglang_cpu  # noqa: E402

sglang_cpu.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
