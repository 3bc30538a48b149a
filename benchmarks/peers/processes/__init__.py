"""Each contender's way to let several processes use one buffer."""
