"""Packed sequences, the graph of their consumers, and the parts that ``SequenceBuffer`` is built from."""
