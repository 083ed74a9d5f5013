"""The configuration file: its keys, its strict YAML reader and its explanations."""

from kvtier.config.schema import (
    G2,
    G2_CAPACITY_DEFAULT,
    G3,
    G3_CAPACITY_MIN,
    G4,
    Config,
    Offload,
    cache_folder,
    config_file,
)

__all__ = [
    "G2",
    "G2_CAPACITY_DEFAULT",
    "G3",
    "G3_CAPACITY_MIN",
    "G4",
    "Config",
    "Offload",
    "cache_folder",
    "config_file",
]
