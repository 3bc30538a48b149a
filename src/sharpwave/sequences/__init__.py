"""Packed sequences and the graph of who reads and makes their keys: what ``SequenceBuffer`` is built from."""
