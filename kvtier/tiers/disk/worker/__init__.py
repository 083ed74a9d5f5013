"""G3 in a worker process, over the arena of the process that computes."""
