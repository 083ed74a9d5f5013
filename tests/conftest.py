"""What all tests have in common: cases that hypothesis draws are the same in every run; no slow machine fails one."""

from __future__ import annotations

import os

from hypothesis import settings

# For these processes and all that they start. Threads of OpenMP that wait for each other spin: with tiny models on a
# busy machine that is three quarters of the processor time of an engine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("same cases", derandomize=True, deadline=None)
settings.load_profile("same cases")
