"""Kernels for tensors on a GPU. Imported only when there is such a tensor: they need Triton."""
