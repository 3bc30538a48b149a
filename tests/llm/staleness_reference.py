"""The cost model by itself: one computer that a generator and a trainer share, as two plain loops over time.

It knows nothing of controllers, permits or buffers. Runs of the system in simulated time have to take as long.
"""

import heapq

PROMPT = 3  # tokens


def sync_step_s(lengths, batch, costs):
    """Seconds of a synchronous step: the longest answer of each batch, then training."""
    batches = [lengths[at : at + batch] for at in range(0, len(lengths) - batch + 1, batch)]
    total = 0.0
    for one in batches:
        total += costs.decode_s * max(one) + costs.decode_slot_s * sum(one)
        total += costs.train_s + costs.train_token_s * (sum(one) + PROMPT * batch) + costs.swap_s
    return total / len(batches)


def async_step_s(lengths, batch, slots, max_staleness, steps, costs, warm, chunk=8):
    """Seconds of an asynchronous step, from the end of step `warm` on. Training and generation take turns by chunks."""
    waiting = iter(lengths)
    busy, done, started = [], [], 0
    now = training = 0.0
    in_training, version, ends = None, 0, []
    number = 0
    while version < steps:
        while len(busy) < slots and started < (max_staleness + version + 1) * batch:
            length = next(waiting)
            busy.append([length, length, number])
            number, started = number + 1, started + 1
        if in_training is None and len(done) >= batch:
            in_training = [heapq.heappop(done) for _ in range(batch)]
            training = costs.train_s + costs.train_token_s * (sum(length for _, length in in_training) + PROMPT * batch)
        if busy:
            count = min(chunk, max(left for left, _, _ in busy))
            took = costs.decode_s * count + costs.decode_slot_s * sum(min(left, count) for left, _, _ in busy)
            shared = min(training, took) if in_training is not None else 0.0
            training -= shared
            now += took + shared
            for slot in busy:
                slot[0] -= count
            for slot in busy:
                if slot[0] <= 0:
                    heapq.heappush(done, (slot[2], slot[1]))
            busy = [slot for slot in busy if slot[0] > 0]
        else:
            now, training = now + training, 0.0
        if in_training is not None and training <= 1e-12:
            in_training, version, now = None, version + 1, now + costs.swap_s
            ends.append(now)
    return (ends[-1] - ends[warm - 1]) / (steps - warm)
