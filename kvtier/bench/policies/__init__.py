"""Eviction policies that kvtier is compared with; no cache can be configured to use them."""
