"""Device copies and CUDA kernels, installed as kvtier.kernels.

engine   opening a copy engine on the device that holds a pool, or on the CPU
copy     the engine: queues, order, priority, cancellation, acknowledgements
mover    the protocol of what makes the engine's copies
layout   where a block's bytes lie, in engine tensors, pools and host slots
plan     from (blocks, slots) to the fewest runs of bytes; pure
memory   host memory: mapped, populated near the GPU; page_lock locks its pages
cpu      the mover without a device
cuda     the mover on an NVIDIA GPU; driver, grid, method and copy.cu are its parts
"""
