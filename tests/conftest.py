"""What all tests have in common: cases that hypothesis draws are the same in every run; no slow machine fails one."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same cases", derandomize=True, deadline=None)
settings.load_profile("same cases")
