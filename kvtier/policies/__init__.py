"""Eviction policies, one per file, all behind `kvtier.policy.Policy`."""
