"""The tests and the code of the projects whose names ``sharpwave.compat`` has, run on our classes.

Nothing of these projects is stored here: each runner takes a path to a checkout. ``make compat`` runs them; a plain
``pytest`` does not collect them.
"""
