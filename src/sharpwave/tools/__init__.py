"""The command line and what it runs; these modules use the public API only.

The wheel installs the repository's `examples/per_dqn.py` here as `sharpwave.tools.per_dqn`: the example and
`sharpwave demo` train with one piece of code.
"""
