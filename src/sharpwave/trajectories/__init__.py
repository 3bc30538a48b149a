"""Trajectories: what one is, the files and the index of a folder of them, checkpoints, merging and splitting."""
