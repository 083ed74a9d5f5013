"""G1: paged pools in GPU memory."""
