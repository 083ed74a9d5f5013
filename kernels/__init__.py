"""Device copies and CUDA kernels, installed as kvtier.kernels.

layout   where a block's bytes lie, in engine tensors, pools and host slots
plan     from (blocks, slots) to the fewest runs of bytes; pure
copy     the copy engine: queues, order, priority, cancellation, acknowledgements
cpu      its fallback without a device
cuda     its mover on an NVIDIA GPU, over torch tensors; imported only where there is one
"""
