"""Kernels of a decode step. `fused` runs on a GPU; `plain` is the same in torch, for CPUs and as the reference."""
