"""Clients of object stores behind one protocol."""
