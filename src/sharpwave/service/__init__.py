"""Buffers for other processes and machines: a server, its clients, and the keys that they show."""
