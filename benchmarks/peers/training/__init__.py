"""How each contender serves a learner in torch: rows in as an environment gives them, tensors out."""
