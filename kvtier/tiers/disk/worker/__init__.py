"""G3 in a process of its own, over the arena of the process that computes."""
