"""Each contender's way to save a buffer and to load it."""
