"""The command line and what it runs; these modules use the public API only.

The wheel installs the repository's `examples/dqn.py` here as `sharpwave.tools.dqn`, so that `sharpwave demo` and
the example are one piece of code.
"""
