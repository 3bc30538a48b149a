"""Buffers between machines: a server that holds them, and clients that say the same verbs. See docs/protocol.md."""
