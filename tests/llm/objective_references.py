"""The objectives as slow, obvious NumPy: one token at a time, with gradients derived by hand."""

import math

import numpy as np

FURTHEST = 20.0


def clipped(lp, behaviour, proximal, advantage, method, clip, clip_high, cap, over_cap):
    """Loss of one token, and its derivative by `lp`."""
    base = behaviour if method == "naive" else proximal
    weight = 1.0
    if method == "decoupled":
        weight = math.exp(min(max(proximal - behaviour, -FURTHEST), FURTHEST))
        if cap is not None and weight > cap:
            weight = 0.0 if over_cap == "mask" else cap
    high = clip if clip_high is None else clip_high
    far = abs(lp - base) > FURTHEST
    ratio = math.exp(min(max(lp - base, -FURTHEST), FURTHEST))
    bounded = min(max(ratio, 1 - clip), 1 + high)
    loss = -weight * min(ratio * advantage, bounded * advantage)
    is_clipped = ratio * advantage > bounded * advantage
    return loss, 0.0 if is_clipped or far else -weight * ratio * advantage


def kl(lp, reference):
    difference = reference - lp
    return math.exp(difference) - difference - 1, 1 - math.exp(difference)


def fitted(value, old, target, clip):
    """Half the squared error of one value, and its derivative."""
    plain = (value - target) ** 2
    if clip is None:
        return 0.5 * plain, value - target
    near = min(max(value, old - clip), old + clip)
    held = (near - target) ** 2
    if held > plain:
        return 0.5 * held, (value - target) if near == value else 0.0
    return 0.5 * plain, value - target


def policy(given, sequences, lps, entropies):
    """Loss of a minibatch, and its derivatives by the log-probability and entropy of each token.

    `sequences` are dicts of lists: learned, fresh, behaviour, proximal, reference, advantages.
    """
    total, by_lp, by_entropy = 0.0, [], []
    for sequence, own_lps, own_entropies in zip(sequences, lps, entropies, strict=True):
        grads, entropy_grads = np.zeros(len(own_lps)), np.zeros(len(own_lps))
        for t, lp in enumerate(own_lps):
            share = share_of(given.level, sequences, sequence, t)
            if share == 0:
                continue
            loss, slope = clipped(
                lp, sequence["behaviour"][t], sequence["proximal"][t], sequence["advantages"][t],
                given.method, given.clip, given.clip_high, given.cap, given.over_cap,
            )  # fmt: skip
            if given.kl:
                more, more_slope = kl(lp, sequence["reference"][t])
                loss, slope = loss + given.kl * more, slope + given.kl * more_slope
            total += share * (loss - given.entropy * own_entropies[t])
            grads[t], entropy_grads[t] = share * slope, -share * given.entropy
        by_lp.append(grads)
        by_entropy.append(entropy_grads)
    return total, by_lp, by_entropy


def share_of(level, sequences, sequence, t):
    """A mean over all learned tokens, or over sequences of their means. Stale tokens count as 0 and are counted."""
    if not (sequence["learned"][t] and sequence["fresh"][t]):
        return 0.0
    if level == "token":
        return 1 / sum(sum(one["learned"]) for one in sequences)
    return 1 / (sum(sequence["learned"]) * len(sequences))


def group_advantages(rewards, groups, scale, baseline):
    made = []
    for at, reward in enumerate(rewards):
        own = [other for other, group in zip(rewards, groups, strict=True) if group == groups[at]]
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == groups[at] and i != at]
        if not others:
            made.append(0.0)
            continue
        made.append(reward - float(np.mean(own if baseline == "mean" else others)))
        if scale == "std":
            made[-1] /= np.std(own, ddof=1) + 1e-6
    return made


def estimated(rewards, values, gamma, gae_lambda):
    """Advantages of the steps of one sequence, by the definition: a sum of discounted temporal differences."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    return [sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]
