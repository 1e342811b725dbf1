"""The rungs as Triton kernels: each does what its ledger counts, tile for tile, and no more.

They are made to be read and measured, not used: dense contiguous tensors, causal or not, forward only. The library's own kernels are the
rungs above them.
"""
