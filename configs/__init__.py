"""Configurations to start from, one file per kind of machine; installed as kvtier.presets."""
