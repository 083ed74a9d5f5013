"""Measurements behind `kvtier bench …` and `kvtier plan`."""
