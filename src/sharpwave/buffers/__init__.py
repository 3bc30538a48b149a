"""The faces: one table, sampler and view each, and the arithmetic of their algorithm family."""
