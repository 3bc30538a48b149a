"""Tasks that go wrong, by the name that `Experiment(task=)` takes: "failing_tasks:NAME"."""

import dataclasses
from collections import Counter

from sharpwave.llm.agent import single_turn
from sharpwave.llm.items import Items
from sharpwave.llm.rewards import Rewards
from sharpwave.llm.tasks import load_task


def sort_with(agent, seed):
    return dataclasses.replace(load_task("sort", digits=2, count=20, held_out=2, seed=seed), agent=agent)


def raises(*, seed=0):
    raise RuntimeError("no data here")


def returns_nothing(*, seed=0):
    return None


def has_no_seed():
    return load_task("sort", digits=2, count=20, held_out=2)


def takes_all(**options):
    return load_task("sort", digits=2, count=20, held_out=2, **options)


def items_are_a_list(*, seed=0):
    return dataclasses.replace(load_task("sort", digits=2, count=20, held_out=2), items=[{"prompt": "12>"}])


def sampling_is_a_dict(*, seed=0):
    return dataclasses.replace(load_task("sort", digits=2, count=20, held_out=2), sampling={"max_tokens": 3})


NO_FUNCTION = 3


def held_out_items_fail(*, seed=0):
    task = load_task("sort", digits=2, count=20, held_out=2, seed=seed)

    async def agent(item, generate):
        if item in [task.held_out[name] for name in task.held_out.ids]:
            raise KeyError("nothing here")
        return await task.agent(item, generate)

    return dataclasses.replace(task, agent=agent)


def no_item_works(*, seed=0):
    async def agent(item, generate):
        raise KeyError("nothing here")

    return sort_with(agent, seed)


def answers_fail_after_fifty(*, seed=0):
    good, seeds = load_task("sort", digits=2, count=20, held_out=2, seed=seed).agent, []

    async def agent(item, generate):
        if len(seeds) >= 50:
            raise KeyError("nothing here")
        seeds.append(generate.seed)
        return await good(item, generate)

    return sort_with(agent, seed)


def every_tenth_item_raises(*, seed=0):
    good = load_task("sort", digits=2, count=20, held_out=2, seed=seed).agent

    async def agent(item, generate):
        if int(item["id"]) % 10 == 0:
            raise KeyError("nothing here")
        return await good(item, generate)

    return sort_with(agent, seed)


def every_tenth_reward_is_nan(*, seed=0):
    def reward(item, text):
        return float("nan") if int(item["id"]) % 10 == 0 else len(text) / 3

    return sort_with(single_turn(reward), seed)


def every_tenth_reward_hangs(*, seed=0):
    reward = Rewards("reward_functions:hang_on_every_tenth", timeout_s=0.5, tries=1)
    return sort_with(single_turn(reward), seed)


def prompts_are_too_long(*, seed=0):
    return dataclasses.replace(load_task("sort", digits=2, count=20, held_out=2, seed=seed), context=4)


def tokens_are_not_in_the_vocabulary(*, seed=0):
    task = load_task("sort", digits=2, count=20, held_out=2, seed=seed)
    return dataclasses.replace(task, vocabulary=2)


def items_have_no_prompt(*, seed=0):
    task = load_task("sort", digits=2, count=20, held_out=2, seed=seed)
    items = Items([{"id": str(number), "question": "12>"} for number in range(20)])
    return dataclasses.replace(task, items=items, agent=single_turn(lambda item, text: 1.0))


def reward_is_missing(*, seed=0):
    return sort_with(single_turn(Rewards("reward_functions:nowhere")), seed)


def solved_after_forty_answers(*, seed=0):
    """From then on all answers are right."""
    answers = Counter()

    def reward(item, text):
        answers[item["id"]] += 1
        return float(answers[item["id"]] % 2 or answers.total() > 40)

    return sort_with(single_turn(reward), seed)


def solved(*, seed=0):
    return sort_with(single_turn(lambda item, text: 1.0), seed)


def works(*, seed=0):
    return load_task("sort", digits=2, count=20, held_out=2, seed=seed)
