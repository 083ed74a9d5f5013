"""G3: slab segments on a local SSD under an LMDB index."""
