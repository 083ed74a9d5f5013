"""G4: strides of blocks as objects in a bucket."""
