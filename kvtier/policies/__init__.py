"""Eviction policies, one per file, all behind `kvtier.policies.policy.Policy`."""
