"""The four tiers and their wrappers."""
