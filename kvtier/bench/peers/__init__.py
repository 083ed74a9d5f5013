"""Engines with kvtier, with other stores and with nothing, in one run."""
