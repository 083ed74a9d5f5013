"""G2: host RAM."""
