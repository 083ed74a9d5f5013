"""The whole idea on one model: KV leaves G1 for G2, G3 and G4, the process ends, the next one brings it back.

model      a small Llama with random weights, or one from a directory
script     the conversations and the order in which their turns come
reference  what was stored, kept outside kvtier, and the three comparisons
replay     one process: turns, measured and checked
stage      both processes, one after the other, and what they reported
"""
