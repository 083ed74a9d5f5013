"""The latest requests of a running cache, kept in memory to explain misses: nothing of them is written anywhere."""
