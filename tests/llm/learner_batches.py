"""Batches for the tests of the learner."""

import numpy as np

import sharpwave as sw


def batch_of(seed=0, data=4, group=3, longest=14, vocabulary=259, stale=0.0, ids=None, **more):
    """Random sequences: a prompt, an answer, in some a tool's output, and an answer again."""
    random = np.random.default_rng(seed)
    lens = [[int(n) for n in random.integers(3, longest + 1, group)] for _ in range(data)]
    flat = [n for row in lens for n in row]
    total = sum(flat)
    masks = []
    for length in flat:
        mask = np.arange(length) >= random.integers(1, 3)
        if length > 4:  # with 5 tokens the tool speaks last
            mask[4] = False
        masks.append(mask)
    columns = {
        "input_ids": random.integers(0, vocabulary, total),
        "loss_mask": np.concatenate(masks),
        "logprobs": random.normal(-5, 0.7, total).astype(np.float32),
        "versions": np.repeat(random.integers(0, 3, len(flat)), flat),
        "rewards": random.normal(size=len(flat)).astype(np.float32),
        **{key: random.normal(mean, 0.7, total).astype(np.float32) for key, mean in more.items()},
    }
    if stale:
        columns["fresh"] = random.random(total) >= stale
    seqlens = {key: [[1] * group] * data if key == "rewards" else lens for key in columns}
    return sw.SequenceSample(ids or [f"d{at}" for at in range(data)], seqlens, columns)
