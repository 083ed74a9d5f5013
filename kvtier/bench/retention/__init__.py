"""Traces of requests, replayed and simulated: the worth of keeping KV longer."""
