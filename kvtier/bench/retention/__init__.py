"""Traces of requests, replayed and simulated: the value of longer retention."""
