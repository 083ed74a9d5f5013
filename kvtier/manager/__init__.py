"""The object that knows all tiers below G1, and its parts."""
