"""Makes an interpreter with vLLM and LMCache and prints its path: for `kvtier bench peers --engine vllm --lmcache`.

    python benchmarks/peers/engine_with_lmcache.py --work peers

One is made once for each list of packages. kvtier needs it on no other occasion: its own tests run without LMCache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from contenders import ENGINE_WITH_LMCACHE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvtier-peers", help="a directory")
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    print(ENGINE_WITH_LMCACHE.python(work, lambda line: print(line, file=sys.stderr)))


if __name__ == "__main__":
    main()
