"""Each contender's way to advantages and returns."""
