"""The controller call by call: admission, outcomes, deaths, restarts, and what it says."""

import asyncio
import dataclasses

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.llm.controller import Controller
from sharpwave.llm.cut import Cut
from sharpwave.llm.episode import Episode, to_sample, train_flow
from sharpwave.llm.generators import Answer
from sharpwave.llm.items import Items
from sharpwave.llm.rules import Rules
from sharpwave.llm.simulation import simulate


def episode(reward, version=0):
    made = Episode([1, 2], reward=reward)
    made.take(Answer([7, 8, 9], [-1.0] * 3, [version] * 3, "stop"))
    return made


def sample_of(permit, rewards=(0.0, 1.0), version=0):
    return to_sample(permit.key, [episode(reward, version) for reward in rewards])


def controlled(body, items=20, journal=None, outside_s=0.0, **rules):
    """Runs a coroutine function with a controller and a clock."""

    async def main(clock):
        given = {"batch": 2, "max_staleness": 1, "shuffle": False, **rules}
        controller = Controller(Items([{"id": n} for n in range(items)]), Rules(**given), clock, journal=journal)
        try:
            return await body(controller, clock)
        finally:
            controller.close()

    return simulate(main, outside_s=outside_s)


async def soon(call, clock, seconds=0.001):
    """A call's task, after it had time to end."""
    task = asyncio.ensure_future(call)
    await clock.sleep(seconds)
    return task


async def step(controller, version):
    """Trains one batch."""
    lease = await controller.take("learner")
    await controller.trained(lease, version)
    return list(lease.batch.ids)


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_so_many_items_start_beyond_those_that_are_trained(max_staleness):
    async def body(controller, clock):
        calls = [await soon(controller.start("a"), clock) for _ in range(40)]
        begun = [call.result() for call in calls if call.done()]
        assert len(begun) == 2 * (max_staleness + 1)
        for permit in begun[:2]:  # in the buffer they count as before
            assert await controller.finish(permit, sample_of(permit)) == "kept"
        await clock.sleep(1)
        assert sum(call.done() for call in calls) == 2 * (max_staleness + 1)
        assert await step(controller, version=1) == ["0/0", "0/1"]
        await clock.sleep(1)
        assert sum(call.done() for call in calls) == 2 * (max_staleness + 2)
        for call in calls:
            call.cancel()

    controlled(body, items=100, max_staleness=max_staleness)


def test_a_permit_names_the_oldest_version_that_may_begin():
    async def body(controller, clock):
        assert (await controller.start("a")).version == 0
        permit = await controller.start("a")
        for one in (permit, await controller.start("a")):
            await controller.finish(one, sample_of(one))
        await step(controller, version=7)
        assert (await controller.start("a")).version == 6

    controlled(body)


def test_max_running_is_a_bound_of_its_own():
    async def body(controller, clock):
        first = await controller.start("a")
        waiting = await soon(controller.start("b"), clock)
        assert not waiting.done()
        assert "for other agents: max_running=1 items run" in controller.explain()
        await controller.finish(first, sample_of(first))
        assert (await waiting).key == "0/1"

    controlled(body, max_running=1)


def test_a_call_that_is_cancelled_keeps_no_item():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        waiting = await soon(controller.start("a"), clock)
        await controller.reject(begun[0], "why")  # the permit is on its way to the call when that is cancelled
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert controller.stats()["running"] == 3
        assert (await controller.start("b")).key == "0/4"

    controlled(body)


# ---- outcomes --------------------------------------------------------------------------------------------------------


def test_a_group_without_signal_is_left_out_and_another_item_takes_its_place():
    async def body(controller, clock):
        for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0)):
            permit = await controller.start("a")
            said = await controller.finish(permit, sample_of(permit, rewards))
            assert said == ("kept" if rewards[0] != rewards[1] else "no_signal")
        assert controller.capacity() == 3
        assert controller.stats()["no_signal"] == 2

    controlled(body)


def test_an_epoch_without_any_signal_ends_the_run_with_the_reason():
    async def body(controller, clock):
        learner = asyncio.ensure_future(controller.take("learner"))
        for _ in range(3):
            permit = await controller.start("a")
            await controller.finish(permit, sample_of(permit, (1.0, 1.0)))
        with pytest.raises(NotReady, match="answers to the same item have equal rewards, the last ones 1; other items"):
            await controller.start("a")
        with pytest.raises(
            NotReady, match=r"epoch 0 is over and nothing was trained \(3 no_signal, 0 rejected so far\)"
        ):
            await learner
        with pytest.raises(NotReady, match="skip_no_signal=False would mend it"):
            await controller.start("a")

    controlled(body, items=3)


async def settle_epochs(controller, *epochs):
    """Each letter is an item: trained, without signal, rejected."""
    for letter in "".join(epochs):
        permit = await controller.start("a")
        if letter == "r":
            await controller.reject(permit, "no")
        elif letter == "n":
            await controller.finish(permit, sample_of(permit, (1.0, 1.0)))
        else:
            await controller.finish(permit, sample_of(permit, version=controller.version))
            await step(controller, controller.version + 1)


def test_a_run_that_has_learnt_ends_in_order_after_an_epoch_without_any_signal():
    async def body(controller, clock):
        await settle_epochs(controller, "tnn", "nn")
        begun, other = await controller.start("a"), await controller.start("b")
        learner = await soon(controller.take("learner"), clock)
        await controller.finish(begun, sample_of(begun, (1.0, 1.0)))
        waiting = await soon(controller.start("a"), clock)
        assert not controller.is_over  # what was begun is brought to its end
        assert await controller.finish(other, sample_of(other, version=1)) == "kept"
        lease = await learner
        assert list(lease.batch.ids) == ["2/0"]
        await controller.trained(lease, 2)
        assert await waiting is None
        assert await controller.take("learner") is None
        said = "All answers to each item have equal rewards, the last ones 1: nothing is left to learn from."
        assert controller.why_over == f"{said} Give other items, a finer reward or skip_no_signal=False."
        assert controller.explain() == f"The run is over. {controller.why_over}"

    controlled(body, items=3, batch=1, max_staleness=2)


@pytest.mark.parametrize("epochs", [("nnn",), ("tnn", "nrn")])
def test_an_epoch_without_signal_is_a_failure_where_nothing_was_learnt_or_items_failed(epochs):
    async def body(controller, clock):
        await settle_epochs(controller, *epochs)
        with pytest.raises(NotReady, match=rf"epoch {len(epochs) - 1} is over and nothing was trained"):
            await controller.take("learner")

    controlled(body, items=3, batch=1, max_staleness=2)


def test_groups_without_signal_are_trained_where_they_are_wanted():
    async def body(controller, clock):
        permit = await controller.start("a")
        return await controller.finish(permit, sample_of(permit, (1.0, 1.0)))

    assert controlled(body, skip_no_signal=False) == "kept"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda key: to_sample("0/9", [episode(1.0)]), "expected one sample with the permit's key as its id"),
        (lambda key: to_sample(key, [episode(1.0)]).select(["input_ids", "rewards"]), "lacks logprobs, loss_mask"),
    ],
)
def test_a_wrong_sample_is_refused_and_the_permit_stays(change, said):
    async def body(controller, clock):
        permit = await controller.start("a")
        with pytest.raises(SchemaError, match=said):
            await controller.finish(permit, change(permit.key))
        assert controller.stats()["running"] == 1
        assert await controller.finish(permit, sample_of(permit)) == "kept"
        assert await controller.finish(permit, sample_of(permit)) == "unwanted"

    controlled(body)


def test_tokens_that_are_too_old_are_masked():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        for permit in begun[:2]:
            await controller.finish(permit, sample_of(permit))
        await step(controller, version=1)
        for permit, version in zip(begun[2:], (0, 5), strict=True):
            sample = to_sample(permit.key, [episode(0.0, version), episode(1.0, 5)])
            assert await controller.finish(permit, sample) == "kept"
        controller.buffer.set_version(5)
        lease = await controller.take("learner")
        assert lease.batch["fresh"].tolist() == [False] * 5 + [True] * 15

    controlled(body)


def test_samples_without_a_fresh_token_are_made_again():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        for permit in begun[:3]:
            await controller.finish(permit, sample_of(permit))
        assert await step(controller, version=3) == ["0/0", "0/1"]  # all tokens of the third are too old now
        assert await controller.finish(begun[3], sample_of(begun[3])) == "stale"
        assert [(await controller.start("b")).key for _ in range(2)] == ["0/2", "0/3"]

    controlled(body, stale="mask")


def test_samples_that_are_too_old_are_dropped_and_their_items_come_again():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        for permit in begun[:3]:
            await controller.finish(permit, sample_of(permit))
        assert await step(controller, version=3) == ["0/0", "0/1"]  # the third left the buffer with that version
        assert await controller.finish(begun[3], sample_of(begun[3])) == "stale"
        again = [await controller.start("b") for _ in range(2)]
        assert [permit.key for permit in again] == ["0/2", "0/3"]
        assert again[0].seed != begun[2].seed
        assert [await controller.finish(one, sample_of(one, version=3)) for one in again] == ["kept", "kept"]
        assert await step(controller, version=4) == ["0/2", "0/3"]

    controlled(body, stale="drop")


def test_an_item_whose_work_is_lost_too_often_is_rejected():
    async def body(controller, clock):
        for _ in range(3):
            assert (await controller.start("a")).key == "0/0"
            assert controller.lose("a") == 1
        assert (await controller.start("a")).key == "0/1"
        return controller.stats()["rejected"]

    assert controlled(body, max_losses=2) == 1


@pytest.mark.parametrize(("max_losses", "before"), [(1, 1), (2, 2), (5, 2)])
def test_items_whose_owners_died_are_worked_on_alone_and_one_after_the_other(max_losses, before):
    """Each is trained or rejected before the next one is suspected."""

    async def body(controller, clock):
        for _ in range(before):
            begun = [(await controller.start("a")).key for _ in range(3)]
            assert begun == ["0/0", "0/1", "0/2"]
            assert controller.lose("a") == 3
        for _ in range(max_losses + 1 - before):
            assert (await controller.start("a")).key == "0/0"
            more = await soon(controller.start("a"), clock)
            assert not more.done()  # not even an item that is no suspect
            assert controller.lose("a") == 1
            await clock.sleep(0.001)
            assert more.cancelled()
        assert controller.stats()["rejected"] == 1
        alone = await controller.start("a")
        assert alone.key == "0/1"
        waiting = await soon(controller.start("a"), clock)
        other = await controller.start("b")  # one without items gets the next suspect
        assert (other.key, waiting.done()) == ("0/2", False)
        for permit in (alone, other):
            await controller.finish(permit, sample_of(permit))
        assert (await waiting).key == "0/3"
        assert (await controller.start("a")).key == "0/4"

    controlled(body, max_losses=max_losses, batch=4)


def test_a_sample_that_is_refused_fails_alone_among_those_that_are_handed_in_with_it():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        samples = [sample_of(permit) for permit in begun]
        samples[2] = samples[2].select(["input_ids", "rewards"])
        calls = [asyncio.ensure_future(controller.finish(*one)) for one in zip(begun, samples, strict=True)]
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert [told[at] for at in (0, 1, 3)] == ["kept"] * 3
        assert isinstance(told[2], SchemaError)

    controlled(body, outside_s=1.0)


def test_the_last_batch_has_what_is_left():
    async def body(controller, clock):
        taken = []

        async def learn():
            while (lease := await controller.take("learner")) is not None:
                taken.append(list(lease.batch.ids))
                await controller.trained(lease, controller.version + 1)

        learner = asyncio.ensure_future(learn())
        while (permit := await controller.start("a")) is not None:
            await clock.sleep(1)
            await controller.finish(permit, sample_of(permit, version=controller.version))
        await learner
        assert controller.explain() == "The run is over. Every item is settled."
        return taken

    assert controlled(body, items=5, epochs=1) == [["0/0", "0/1"], ["0/2", "0/3"], ["0/4"]]


def test_batches_follow_the_order_of_the_data_and_not_of_the_answers():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(4)]
        for permit in (begun[3], begun[2], begun[1]):
            await controller.finish(permit, sample_of(permit))
        assert await step(controller, 1) == ["0/1", "0/2"]

    controlled(body)


def test_a_version_only_grows():
    async def body(controller, clock):
        for _ in range(2):
            permit = await controller.start("a")
            await controller.finish(permit, sample_of(permit))
        lease = await controller.take("learner")
        with pytest.raises(SchemaError, match="version: expected a whole number, at least 1, got 0"):
            await controller.trained(lease, 0)
        await controller.trained(lease, 9)
        assert (controller.step, controller.version) == (1, 9)
        with pytest.raises(StaleHandle, match="it was said before"):
            await controller.trained(lease, 10)

    controlled(body)


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_permits_and_leases_of_a_dead_owner_return():
    async def body(controller, clock):
        begun = [await controller.start(name) for name in "aab"]
        assert controller.lose("a") == 2
        assert [(await controller.start("c")).key for _ in range(2)] == ["0/0", "0/1"]
        await controller.finish(begun[2], sample_of(begun[2]))
        again = await controller.start("d")
        await controller.finish(again, sample_of(again))
        lease = await controller.take("learner")
        assert controller.lose("learner") == 2
        with pytest.raises(StaleHandle):
            await controller.trained(lease, 1)
        assert (await controller.take("next")).batch.ids == lease.batch.ids

    controlled(body)


def test_an_owner_that_is_silent_is_lost():
    async def body(controller, clock):
        watch = asyncio.ensure_future(controller.watch())
        await controller.start("silent")
        await controller.start("alive")
        for _ in range(10):
            await clock.sleep(1)
            controller.hear("alive")
        watch.cancel()
        assert [permit.owner for permit in controller._permits.out.values()] == ["alive"]
        assert (await controller.start("new")).key == "0/0"

    controlled(body, owner_timeout_s=3.0)


def test_work_of_an_owner_that_was_taken_for_dead_counts_while_no_other_has_begun_it():
    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(2)]
        controller.lose("a")
        assert (await controller.start("b")).key == "0/0"
        assert await controller.finish(begun[0], sample_of(begun[0])) == "unwanted"
        # A permit of a former controller may have the number of one that is out now.
        of_former = dataclasses.replace(begun[1], number=2)
        assert await controller.finish(of_former, sample_of(of_former)) == "kept"
        assert (await controller.start("b")).key == "0/2"
        assert controller.stats()["running"] == 2

    controlled(body)


def test_an_owner_that_dies_while_its_sample_is_written_has_handed_it_in():
    """The death is heard before the sample is in the buffer, and when it is there and the call has not returned."""

    async def body(controller, clock):
        for moment in (0.25, 0.75):
            permit = await controller.start("a")
            put = asyncio.ensure_future(controller.finish(permit, sample_of(permit)))
            await clock.sleep(moment)
            assert controller.lose("a") == 0
            assert await put == "kept"
        assert [controller.buffer.ids(), controller.capacity()] == [["0/0", "0/1"], 2]

    controlled(body, outside_s=1.0)


def test_a_sample_that_is_handed_in_twice_at_once_is_put_once():
    async def body(controller, clock):
        permit = await controller.start("a")
        calls = [controller.finish(permit, sample_of(permit)) for _ in range(2)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert first == "kept"
        assert "is being handed in already" in str(second)
        assert (len(controller.buffer), controller.stats()["running"]) == (1, 0)

    controlled(body)


def test_calls_that_are_cancelled_while_they_write_are_made_all_the_same():
    async def body(controller, clock):
        for moment in (0.25, 0.75):
            permit = await controller.start("a")
            put = asyncio.ensure_future(controller.finish(permit, sample_of(permit)))
            await clock.sleep(moment)
            put.cancel()
            await clock.sleep(1)
            assert put.cancelled()
        assert (controller.buffer.ids(), controller.stats()["running"]) == (["0/0", "0/1"], 0)
        lease = await controller.take("learner")
        call = asyncio.ensure_future(controller.trained(lease, 1))
        await clock.sleep(1.25)
        call.cancel()
        await clock.sleep(2)
        assert (controller.stats()["trained"], controller.step, controller.lose("learner")) == (2, 1, 0)

    controlled(body, outside_s=1.0)


def test_a_death_while_a_batch_is_acknowledged_brings_no_item_of_it_back():
    async def body(controller, clock):
        for _ in range(2):
            permit = await controller.start("a")
            await controller.finish(permit, sample_of(permit))
        lease = await controller.take("learner")
        call = asyncio.ensure_future(controller.trained(lease, 1))
        await clock.sleep(1.75)  # acknowledged, and the call has not returned
        assert len(controller.buffer) == 0
        controller.lose("a")
        await call
        assert (await controller.start("b")).key == "0/2"
        return controller.stats()["trained"]

    assert controlled(body, outside_s=1.0, stale="drop") == 2


@pytest.mark.parametrize("turns", range(8))
def test_a_call_that_is_cancelled_while_its_number_of_items_changes_ends(turns):
    """At each turn of the event loop until it waits for the new number."""

    async def body(controller, clock):
        begun = [await controller.start("a") for _ in range(3)]
        await controller.finish(begun[0], sample_of(begun[0]))
        call = await soon(controller.take("learner"), clock)  # waits for two
        for permit in begun[1:]:
            await controller.reject(permit, "why")
        for _ in range(turns):
            await asyncio.sleep(0)
        has_batch = call.done()
        call.cancel()
        await clock.sleep(1)
        assert call.cancelled() or (has_batch and call.done())
        if call.cancelled():
            assert (await soon(controller.take("next"), clock)).done()

    controlled(body, items=3, epochs=1)


def test_a_batch_that_is_taken_while_another_is_acknowledged_has_as_many_items_as_are_left():
    async def body(controller, clock):
        for _ in range(3):
            await put_one(controller)
        lease = await controller.take("learner")
        call = asyncio.ensure_future(controller.trained(lease, 1))
        await clock.sleep(1.75)  # acknowledged, and not settled yet
        other = await soon(controller.take("other"), clock, 2)
        await call
        assert list((await other).batch.ids) == ["0/2"]

    controlled(body, items=3, epochs=1, batch=2, outside_s=1.0)


def test_an_item_returns_whose_sample_cannot_be_written_after_the_death_of_its_owner():
    async def body(controller, clock):
        permit = await controller.start("a")

        def put(*given, **more):
            raise StorageError("No space left on device")

        controller.buffer._sequences.put = put
        call = asyncio.ensure_future(controller.finish(permit, sample_of(permit)))
        await clock.sleep(0.25)
        controller.lose("a")
        with pytest.raises(StorageError):
            await call
        assert (await controller.start("b")).key == permit.key
        assert controller.stats()["running"] == 1

    controlled(body, outside_s=1.0)


# ---- restarts --------------------------------------------------------------------------------------------------------


def test_a_cut_goes_on_where_it_was_and_undoes_what_was_trained_since(tmp_path):
    async def main(clock):
        items, rules = Items([{"id": n} for n in range(6)]), Rules(2, 1, shuffle=False, epochs=1)
        first = Controller(items, rules, clock, journal=tmp_path / "journal")
        for version in (1, 2):
            for _ in range(2):
                permit = await first.start("a")
                await first.finish(permit, sample_of(permit, version=version - 1))
            await step(first, version)
            if version == 1:
                cut = Cut.from_json((await first.checkpoint()).to_json())
        lost = await first.start("a")
        first.halt()  # killed

        second = Controller(items, rules, clock, journal=tmp_path / "journal", cut=cut, version=2)
        assert (second.step, second.version, second.buffer.ids()) == (1, 2, ["0/2", "0/3"])
        assert await step(second, 3) == ["0/2", "0/3"]
        assert second.step == 2
        assert (await second.start("a")).key == lost.key == "0/4"
        second.halt()

        # The controller alone was restarted: the learner has trained what it acknowledged.
        third = Controller(items, rules, clock, journal=tmp_path / "journal", resume=False)
        assert third.stats()["trained"] == 4
        assert [(await third.start("a")).key for _ in range(2)] == ["0/4", "0/5"]
        third.close()
        with pytest.raises(SchemaError, match="the checkpoint is a position in 6 items"):
            Controller(Items([{"id": "x"}]), rules, clock, cut=cut)

    simulate(main)


def test_a_learner_confirms_what_it_trained_while_the_controller_was_away(tmp_path):
    async def main(clock):
        items, rules = Items([{"id": n} for n in range(6)]), Rules(2, 1, shuffle=False, epochs=1)
        first = Controller(items, rules, clock, journal=tmp_path / "journal")
        for _ in range(4):
            permit = await first.start("a")
            await first.finish(permit, sample_of(permit))
        lease = await first.take("learner")
        first.halt()
        second = Controller(items, rules, clock, journal=tmp_path / "journal", resume=False)
        with pytest.raises(StaleHandle):
            await second.trained(lease, 1)
        await second.confirm(lease.batch.ids, "learner", 1)
        assert (second.version, second.buffer.ids()) == (1, ["0/2", "0/3"])
        await second.confirm(lease.batch.ids, "learner", 1)  # sent again: heard before
        assert second.stats()["trained"] == 2
        with pytest.raises(StaleHandle, match="1 of the 2 items are not free"):
            await second.confirm(["0/3", "0/4"], "learner", 2)
        assert await step(second, 2) == ["0/2", "0/3"]
        second.close()

    simulate(main)


def test_a_restarted_controller_goes_on_from_the_cut_that_the_learner_is_still_saving(tmp_path):
    """Else it would hand out again what that cut says is settled, and a learner that resumes counts it twice."""

    async def main(clock):
        items, rules = Items([{"id": n} for n in range(3)]), Rules(2, 1, shuffle=False, epochs=1)

        def controller(**more):
            return Controller(items, rules, clock, journal=tmp_path / "journal", **more)

        first = controller()
        await first.checkpoint()
        permit = await first.start("a")
        assert await first.finish(permit, sample_of(permit, (1.0, 1.0))) == "no_signal"
        cut = await first.checkpoint(step=7)
        first.halt()  # killed, while the learner writes its checkpoint
        second = controller(resume=False)
        assert (second.step, second.stats()["no_signal"]) == (7, 1)
        for _ in range(2):
            await put_one(second)
        await step(second, 1)
        second.halt()
        third = controller(cut=cut)
        await step(third, 2)
        assert {name: third.stats()[name] for name in ("no_signal", "trained")} == {"no_signal": 1, "trained": 2}
        third.close()

    simulate(main)


def test_a_restarted_controller_goes_on_from_the_cut_to_which_the_learner_went_back(tmp_path):
    async def main(clock):
        items, rules = Items([{"id": n} for n in range(3)]), Rules(2, 1, shuffle=False, epochs=1)

        def controller(**more):
            return Controller(items, rules, clock, journal=tmp_path / "journal", **more)

        first = controller()
        saved = await first.checkpoint()
        permit = await first.start("a")
        await first.finish(permit, sample_of(permit, (1.0, 1.0)))
        await first.checkpoint(step=7)  # the learner dies before it has saved this one
        first.halt()
        second = controller(cut=saved)
        second.halt()
        third = controller(resume=False)
        assert (third.step, (await third.start("a")).key) == (0, "0/0")
        third.close()
        (tmp_path / "journal").unlink()
        fourth = controller(resume=False)
        assert fourth.step == 0
        fourth.close()
        with pytest.raises(SchemaError, match="cut: a controller that is restarted alone has its own"):
            controller(cut=saved, resume=False)
        (tmp_path / "journal.cut").write_text("{")
        with pytest.raises(StorageError, match=r"journal\.cut cannot be read"):
            controller(resume=False)

    simulate(main)


def test_a_controller_that_was_replaced_does_not_write_its_cut_over_that_of_the_next(tmp_path):
    async def main(clock):
        items, rules, journal = Items([{}, {}]), Rules(1, 0), tmp_path / "journal"
        first = Controller(items, rules, clock, journal=journal)
        saved = await first.checkpoint(step=1)
        late = asyncio.ensure_future(first.checkpoint(step=2))
        await clock.sleep(1.25)  # the journal has the mark
        first.halt()
        second = Controller(items, rules, clock, journal=journal, cut=saved)
        with pytest.raises(ClosedError):
            await late
        second.halt()
        third = Controller(items, rules, clock, journal=journal, resume=False)
        assert third.step == 1
        third.close()

    simulate(main, outside_s=1.0)


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_it_says_who_waits_for_whom():
    async def body(controller, clock):
        assert controller.explain() == "No learner asks for a batch (0 of 2 items are ready); no agent worker is there."
        learner = await soon(controller.take("learner"), clock)
        assert controller.explain() == (
            "The learner waits for 2 more items (0 of 2 are ready), but no agent worker is there; start one."
        )
        begun = [await controller.start("a") for _ in range(4)]
        await clock.sleep(2.5)
        assert controller.explain() == (
            "The learner waits for 2 more items (0 of 2 are ready), and 4 items run at 1 agent worker, "
            "the oldest since 2.5 s at 'a'."
        )
        waiting = await soon(controller.start("b"), clock)
        for permit in begun[:3]:
            await controller.finish(permit, sample_of(permit))
        await learner
        await clock.sleep(1.5)
        assert controller.explain() == (
            "The learner trains on 2 items, since 1.5 s; 1 call of agent workers waits for the learner: 4 items are "
            "started and not trained, the most that max_staleness allows (1 run, 3 are in the buffer)."
        )
        waiting.cancel()

    controlled(body)


def test_it_names_the_consumer_that_is_late():
    async def main(clock):
        flow = sw.Dataflow(
            [
                sw.Consumer("ref", {"input_ids"}, {"ref_logprobs"}, 2),
                sw.Consumer("train", {"input_ids", "rewards", "versions", "ref_logprobs"}, batch_size=2),
            ]
        )
        controller = Controller(Items([{}, {}]), Rules(2, 0), clock, flow=flow)
        for _ in range(2):
            permit = await controller.start("a")
            await controller.finish(permit, sample_of(permit))
        learner = await soon(controller.take("learner"), clock)
        assert controller.explain() == (
            "The learner waits for 2 items that other consumers are to complete: 2 lack 'ref_logprobs', which 'ref' "
            "makes (2 ready for it, 0 leased to it)."
        )
        with controller.buffer.get("ref") as lease:
            lens = {"ref_logprobs": lease.batch.seqlens["input_ids"]}
            made = sw.SequenceSample(lease.batch.ids, lens, {"ref_logprobs": np.zeros(20, np.float32)})
            controller.buffer.amend(lease.handles, made)
        assert (await learner).batch.keys >= {"ref_logprobs", "rewards"}
        controller.close()

    simulate(main)


def test_the_watchdog_ends_calls_that_wait_with_the_reason():
    async def body(controller, clock):
        watch = asyncio.ensure_future(controller.watch())
        for _ in range(4):
            await controller.start("hung")
        waiting = await soon(controller.start("b"), clock)
        with pytest.raises(NotReady, match="nothing has moved for watchdog_s=60: The learner waits for 2 more items"):
            await controller.take("learner")
        with pytest.raises(NotReady, match="4 items run at 2 agent workers, the oldest since"):
            await waiting
        await watch
        return clock.now()

    assert 60 < controlled(body, watchdog_s=60) < 90


class Held:
    """A clock whose process can be held up, as by Ctrl-Z."""

    def __init__(self, clock):
        self._clock, self.held_s = clock, 0.0
        self.sleep, self.outside = clock.sleep, clock.outside

    def now(self):
        return self._clock.now() + self.held_s


def test_time_in_which_the_process_stood_still_is_no_silence_and_no_standstill():
    async def main(inner):
        clock = Held(inner)
        rules = Rules(batch=2, owner_timeout_s=60, watchdog_s=600)
        controller = Controller(Items([{"id": n} for n in range(20)]), rules, clock)
        watch = asyncio.ensure_future(controller.watch())
        waiting = await soon(controller.take("learner"), clock)  # a call that waits is no silence
        await controller.start("agents")
        await clock.sleep(1)
        clock.held_s = 3600.0
        await clock.sleep(50)
        assert len(controller.permits("agents")) == 1
        await clock.sleep(30)
        assert controller.permits("agents") == []
        with pytest.raises(NotReady, match="nothing has moved for watchdog_s=600"):
            await waiting
        await watch
        controller.close()
        return inner.now()

    assert 600 < simulate(main) < 800


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"batch": 0}, "batch: expected a whole number, at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness: expected a whole number, at least 0, got -1"),
        ({"stale": "evict"}, "stale: expected 'mask' or 'drop', got 'evict'"),
        ({"epochs": 0}, "epochs: expected a whole number, at least 1, got 0"),
        ({"watchdog_s": -5.0}, "watchdog_s: expected a number"),
    ],
)
def test_rules_that_make_no_sense_name_the_key(rules, said):
    with pytest.raises(SchemaError, match=said):
        Rules(**{"batch": 2, **rules})


# ---- stages before the learner ---------------------------------------------------------------------------------------


def reference_of(batch):
    lens = batch.seqlens["input_ids"]
    made = np.full(sum(map(sum, lens)), -2.0, np.float32)
    return sw.SequenceSample(batch.ids, {"ref_logprobs": lens}, {"ref_logprobs": made})


def staged(body, **rules):
    async def main(clock):
        given = {"batch": 2, "max_staleness": 1, "shuffle": False, "epochs": 1, **rules}
        items = Items([{"id": n} for n in range(4)])
        controller = Controller(items, Rules(**given), clock, flow=train_flow(2, reference=True))
        try:
            return await body(controller, clock)
        finally:
            controller.close()

    return simulate(main)


async def put_one(controller, owner="a"):
    permit = await controller.start(owner)
    await controller.finish(permit, sample_of(permit, version=controller.version))


def test_a_stage_completes_samples_before_the_learner_gets_them():
    async def body(controller, clock):
        await put_one(controller)
        await put_one(controller)
        batch = await soon(controller.take("learner"), clock)
        assert not batch.done()
        assert "items that other consumers are to complete" in controller.explain()
        lease = await controller.lend("reference", "stage")
        assert list(lease.batch.ids) == ["0/0", "0/1"]
        with pytest.raises(SchemaError):
            await controller.amend(
                lease, sw.SequenceSample(["0/9"], {"ref_logprobs": [[1]]}, {"ref_logprobs": np.zeros(1)})
            )
        await controller.amend(lease, reference_of(lease.batch))
        assert set(np.asarray((await batch).batch["ref_logprobs"]).tolist()) == {-2.0}

    staged(body)


def test_a_stage_takes_what_is_there_and_a_dead_one_gives_it_back():
    async def body(controller, clock):
        waiting = await soon(controller.lend("reference", "stage"), clock)
        assert not waiting.done()
        await put_one(controller)  # one of a batch of two
        first = await waiting
        assert list(first.batch.ids) == ["0/0"]
        controller.lose("stage")
        second = await controller.lend("reference", "another")
        assert list(second.batch.ids) == ["0/0"]
        with pytest.raises(StaleHandle):
            await controller.amend(first, reference_of(first.batch))
        await controller.amend(second, reference_of(second.batch))

    staged(body)


def test_a_stage_that_waits_ends_with_the_run_and_hears_why_it_failed():
    async def body(controller, clock):
        waiting = await soon(controller.lend("reference", "stage"), clock)
        controller.stop()
        assert await waiting is None
        assert await controller.lend("reference", "stage") is None

    async def fails(controller, clock):
        waiting = await soon(controller.lend("reference", "stage"), clock)
        controller.fail("no more")
        with pytest.raises(NotReady, match="no more"):
            await waiting

    staged(body)
    staged(fails)


def test_lend_names_the_stages_that_there_are():
    async def body(controller, clock):
        with pytest.raises(SchemaError, match="reference"):
            await controller.lend("refrence", "stage")
        with pytest.raises(SchemaError, match="take"):
            await controller.lend("train", "stage")

    staged(body)
