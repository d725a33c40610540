"""python -m lightnet_kernels.bench: correctness, speed, memory and first calls of the kernels on one GPU.

cases    what is measured: shapes, bars, floors, inputs
truth    the scan in float64 as explicit sums, with its gradients and the size each error is measured against
measure  clocks, ceilings, memory, comparisons
scans    one row of the speed table
series   many lengths at a fixed number of tokens: cost per token, one scan against two (the paper's Figure 1)
companions  the ops beside the scan
decode   one token for every sequence
peers    other people's kernels, and first calls, each in a process of its own with a time limit
plot     the JSON as pictures, without a GPU
main     arguments, the order of things, the verdict
"""
