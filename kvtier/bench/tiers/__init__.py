"""The cost of one tier beside the library and device beneath it."""
