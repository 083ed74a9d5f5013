"""`kvtier bench …`."""
