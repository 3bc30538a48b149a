"""The names of other projects' buffers over Sharpwave's own: a snippet runs with only its import line changed."""
