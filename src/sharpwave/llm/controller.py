"""`Controller`: admits items, takes samples in, hands batches out, and counts versions and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..buffers.sequence import SequenceBuffer
from ..checks import told, whole
from ..errors import NotReady, SchemaError, StaleHandle
from ..sequences.dataflow import Dataflow
from ..sequences.leases import Lease
from ..sequences.sample import SequenceSample
from .batches import Batches
from .clock import Clock
from .coroutines import Unbroken
from .cut import Cut, LastCut
from .deliveries import Deliveries
from .episode import read_rewards, train_flow
from .events import no_log
from .explanation import State, explain
from .items import Items
from .permits import Permit, Permits, derive_seed
from .position import Position
from .rules import Rules
from .vigil import Vigil

__all__ = ["STOPPED", "Controller"]

STOPPED = "It was stopped."
"""Why a run is over that was told to stop."""

_SUSPECT = 2  # deaths of its owners from which on an item is worked on alone, unless `max_losses` is less
_CAPACITY = 1 << 40  # admission is the bound; samples whose acknowledgement a resume undid come on top of it


class Controller:
    """The one part of a run that knows all others. For one event loop.

    At most `(max_staleness + 1) * batch` items are started and not trained. Every item is settled once an epoch:
    trained, without signal, or rejected. A process that dies is named to `lose`: its permits and leases come back. An
    item whose owners have died twice (with `max_losses=1` once) is given to an owner that has no other item. So an item
    that kills its owner is rejected after `max_losses`, and no other item with it. With `max_losses=0` all items of a
    process that dies are rejected.

    Args:
        items: The data.
        rules: How much may be started, how old it may be, and so on.
        clock: Time.
        flow: The consumers of samples; the learner's is called "train". None for the learner alone.
        journal: The file in which samples survive this process. The newest cut is kept beside it.
        cut: The learner's checkpoint to go on from: what it trained since is undone.
        resume: Whether the learner begins anew, from `cut`. False where only the controller was restarted: it goes on
            from its newest cut.
        version: The newest version that is published. Leave it out where only the controller was restarted: samples
            that the learner trains on would be too old, and be thrown away, before it has said so.
        log: Called with each event.
    """

    def __init__(
        self,
        items: Items,
        rules: Rules,
        clock: Clock,
        *,
        flow: Dataflow | None = None,
        journal: str | Path | None = None,
        cut: Cut | None = None,
        resume: bool = True,
        version: int = 0,
        log: Callable[..., None] | None = None,
    ) -> None:
        self.rules, self._items, self._clock = rules, items, clock
        self._log: Callable[..., None] = log if log is not None else no_log
        self._flow = train_flow(rules.batch) if flow is None else flow
        if self._flow["train"].batch_size != rules.batch:
            raise SchemaError(f"Controller(): flow: expected batch_size={rules.batch} for 'train', as the rules say")
        self._last_cut = None if journal is None else LastCut(journal)
        if not resume:
            if cut is not None:
                raise SchemaError("Controller(): cut: a controller that is restarted alone has its own; leave it out")
            cut = None if self._last_cut is None else self._last_cut.read()
        elif self._last_cut is not None:
            self._last_cut.write(cut)  # first: what is undone in the journal must be open in the cut
        self.buffer = SequenceBuffer(
            _CAPACITY,
            flow=self._flow,
            max_staleness=rules.max_staleness,
            stale="evict" if rules.is_dropping else "mask",
            journal=None if journal is None else str(journal),
            resume=cut.mark if cut is not None and resume and journal is not None else None,
        )
        self.buffer.set_version(max(version, self.buffer.version, 0 if cut is None else cut.version))
        self.position = Position(items, epochs=rules.epochs, seed=rules.seed, shuffle=rules.shuffle)
        self.step = 0 if cut is None else cut.step
        if cut is not None or journal is not None:
            said = None if cut is None else cut.position
            self.position.restore(said, self.buffer.ids(), self.buffer.used_ids)
        self._deliveries = Deliveries(self.buffer, clock)
        self._permits, self._batches, self._vigil = Permits(), Batches(self.buffer, clock), Vigil(clock, rules)
        # Permits whose sample is being put, with whether the owner could put it again: a death does not take them back.
        self._closing: dict[int, bool] = {}
        self._deaths: Counter[str] = Counter()  # how often the owner of an open item died
        self._leaving: set[str] = set()  # keys whose acknowledgement is being written
        self._to_its_end = Unbroken()  # what writes to the journal
        self._failure: str | None = None
        self._why_stopped: str | None = None
        self._why_no_item = "Every item is settled."  # where the position is over
        self._why_rejected: str | None = None  # of the last item
        self._equal_reward: float | None = None  # of all answers to the last item without signal

    # ---- agents ------------------------------------------------------------------------------------------------------

    async def start(self, owner: str) -> Permit | None:
        """The next item, as soon as one may start. None where the run is over: no item will ever come again.

        Raises:
            NotReady: Nothing has moved for `watchdog_s`, or the run failed.
        """
        self._check("start()", owner)
        return await self._permits.wait(owner, self._serve, lambda permit: self.position.give_back(permit.key))

    async def finish(self, permit: Permit, sample: SequenceSample) -> str:
        """The work on an item is done: its sample, with one sequence for each answer of the group.

        Returns:
            "kept": The learner will get it. "no_signal": all rewards are equal; the item is settled. "stale": it is too
            old already, and comes again. "unwanted": the permit was lost, and the item is another agent's or settled.

        Raises:
            SchemaError: The sample is not one of this item, or lacks keys. The permit stays.
        """
        self._check("finish()", permit.owner)
        rewards = read_rewards(f"finish(): {permit.key!r}", sample, permit.key, self._flow.given_keys)
        if permit.number in self._closing and self._permits.has(permit):
            raise SchemaError(f"finish(): {permit.key!r} is being handed in already")
        is_adopted = not self._permits.has(permit)  # begun before a restart, or by an owner that was taken for dead
        if is_adopted:
            if self.capacity() < 1 or not self.position.claim(permit.key):
                self._log("unwanted", key=permit.key, owner=permit.owner)
                return "unwanted"
            permit = self._permits.adopt(permit)
        if self.rules.skip_no_signal and len(rewards) > 1 and (rewards == rewards[0]).all():
            self._permits.end(permit)
            self.position.settle(permit.key, "no_signal")
            self._equal_reward = float(rewards[0])
            return self._told("no_signal", permit)
        self._closing[permit.number] = not is_adopted  # its owner does not know that number
        return await self._to_its_end(self._put(permit, sample))

    async def _put(self, permit: Permit, sample: SequenceSample) -> str:
        try:
            handle = await self._deliveries.put(sample, self.position.birth(permit.key))
        except BaseException:
            if not self._closing[permit.number]:
                self._permits.end(permit)
                self._lose_item(permit.key)
                self._moved()
            raise
        finally:
            del self._closing[permit.number]
        self._permits.end(permit)
        has_left = handle not in self.buffer
        # It may have been trained before this call goes on.
        if has_left and permit.key in self.position.open and permit.key not in self._leaving:
            self._lose_item(permit.key)
            return self._told("stale", permit)
        return self._told("kept", permit)

    async def reject(self, permit: Permit, why: str) -> None:
        """Every try at the item failed: it is left out of this epoch, and counted."""
        self._check("reject()", permit.owner)
        if self._permits.has(permit) and permit.number not in self._closing:
            self._permits.end(permit)
            self.position.settle(permit.key, "rejected")
            self._why_rejected = why
            self._log("why", key=permit.key, why=why)
            self._told("rejected", permit)

    def _told(self, event: str, permit: Permit) -> str:
        self._log(event, key=permit.key, owner=permit.owner)
        self._moved()
        return event

    # ---- the learner -------------------------------------------------------------------------------------------------

    async def take(self, owner: str) -> Lease | None:
        """The next batch, oldest items first. The last one of all epochs may be smaller. None where the run is over.

        Raises:
            NotReady: Nothing has moved for `watchdog_s`, or the run failed.
        """
        while True:
            self._check("take()", owner)
            if self.is_over:
                return None
            lease = await self._batches.take(owner, self._next_count())
            if lease is not None:
                self._log("take", keys=list(lease.batch.ids), version=self.version)
                self._moved()
                return lease

    def _next_count(self) -> int:
        """How many items the next batch has: `batch`, or at the end of the last epoch what is left."""
        if self.position.has_next or len(self._permits):
            return self.rules.batch
        if self._leaving:  # its samples may have left the buffer and still count as leased
            return 0
        return min(self.rules.batch, len(self.buffer) - self._batches.leased)

    async def trained(self, lease: Lease, version: int, step: int | None = None) -> None:
        """A batch is in the weights of `version`, which are published.

        Args:
            step: The learner's count of steps, where it is not one more than before.

        Raises:
            SchemaError: The version is not above the present one. Nothing was changed.
            StaleHandle: The lease is over: the learner was taken for dead. The items will be trained by another one.
        """
        owner = self._batches.owner_of(lease)
        if owner is None:
            raise StaleHandle("trained(): the lease is over: its owner was taken for dead, or it was said before")
        self._check("trained()", owner)
        version = whole("trained()", "version", version, self.version + 1)
        # Before the acknowledgement: an item that starts in the place of a trained one begins with these weights.
        await self._to_its_end(self._acknowledge([lease], version, step))

    async def confirm(self, keys: Sequence[str], owner: str, version: int, step: int | None = None) -> None:
        """The same as `trained`, for a learner whose lease is gone because the controller was restarted meanwhile.

        Raises:
            StaleHandle: Another learner has one of the items, or has trained it. Nothing was changed.
        """
        self._check("confirm()", owner)
        heard = set(self.buffer.used_ids) - self.position.open.keys()  # before the restart
        mine = self._batches.find(set(keys) - heard, owner)
        await self._to_its_end(self._acknowledge(mine, max(version, self.version), step))

    async def _acknowledge(self, leases: Sequence[Lease], version: int, step: int | None) -> None:
        # The version comes last: a controller that dies in between finds samples that are not too old, and the learner
        # confirms them. Until then nothing starts (`capacity`): what starts next begins with the new weights.
        keys = [key for lease in leases for key in lease.batch.ids]
        self._leaving.update(keys)
        try:
            for lease in leases:
                await self._clock.outside(lease.ack)
                for key in lease.batch.ids:
                    self.position.settle(key, "trained")
            await self._clock.outside(lambda: self.buffer.set_version(version))
            for lease in leases:
                if (owner := self._batches.owner_of(lease)) is not None:
                    del self._batches.leases[owner]
            self.step = self.step + 1 if step is None else max(self.step, step)
            self._log("trained", step=self.step, version=version, keys=keys)
        finally:
            self._leaving.difference_update(keys)
            self._collect_dropped()
            self._moved()

    async def checkpoint(self, step: int | None = None) -> Cut:
        """The position as it is now, and the mark of this moment in the journal. The learner saves it in its own
        checkpoint, between two steps: both are one cut.

        Args:
            step: The learner's count of steps. A controller that was restarted learns it with the next `trained` only.
        """
        self.step = max(self.step, self.step if step is None else step)
        mark = f"step-{self.step}-version-{self.version}"
        kept = self._last_cut
        if kept is not None:
            await self._clock.outside(lambda: self.buffer.checkpoint(mark))
        cut = Cut(mark, self.step, self.version, self.position.to_json())
        if kept is not None:
            await self._clock.outside(lambda: kept.write(cut))
        self._log("checkpoint", mark=mark)
        return cut

    # ---- stages before the learner -----------------------------------------------------------------------------------

    async def lend(self, consumer: str, owner: str) -> Lease | None:
        """Samples for a stage that completes them before training: at least one, at most its batch size.

        Returns:
            None where the run is over.

        Raises:
            SchemaError: The run's dataflow has no such stage.
            NotReady: Nothing has moved for `watchdog_s`, or the run failed.
        """
        self._check("lend()", owner)
        if consumer == "train":
            raise SchemaError("lend(): the learner has its own call, take()")
        most = self._flow[consumer].batch_size
        if self.is_over:
            return None
        lease = await self._batches.take_some(consumer, owner, most)
        if lease is None:  # the run is over, or it failed
            self._check("lend()", owner)
        return lease

    async def amend(self, lease: Lease, made: SequenceSample) -> None:
        """The stage is done with a lease of `lend`: the keys that it made.

        Raises:
            SchemaError: Keys are missing, or of other samples. Nothing was changed, and the lease goes on.
            StaleHandle: The lease is over: the stage was taken for dead. Another one has the samples.
        """
        owner = self._batches.stage_of(lease)
        if owner is None:
            raise StaleHandle("amend(): the lease is over: its owner was taken for dead, or the controller made again")
        self._check("amend()", owner)
        await self._to_its_end(self._complete(owner, lease, made))

    async def _complete(self, owner: str, lease: Lease, made: SequenceSample) -> None:
        # Keys and acknowledgement are one record. Of two, a death in between would leave samples that the learner may
        # train on and the stage still has to see.
        await self._clock.outside(lambda: lease.ack(made))
        if self._batches.lent.get(owner) is lease:
            del self._batches.lent[owner]
        self._collect_dropped()  # what became too old meanwhile was kept for the lease
        self._moved()

    # ---- life and death ----------------------------------------------------------------------------------------------

    def hear(self, owner: str) -> None:
        """The owner is alive. Every call of it says so, too, and so does a call that waits."""
        self._vigil.hear(owner)

    def lose(self, owner: str) -> int:
        """The owner is dead: its permits and leases come back. Returns how many items that were."""
        self._vigil.forget(owner)
        self._permits.dismiss(owner)
        mine = self._permits.of(owner)
        lost = [permit for permit in mine if permit.number not in self._closing]
        self._closing.update((permit.number, False) for permit in mine if permit.number in self._closing)
        for permit in lost:
            self._permits.end(permit)
            self._deaths[permit.key] += 1
            # One that was alone at its owner comes next: it is trained or rejected before another one is suspected.
            self._lose_item(permit.key, is_next=len(mine) == 1 and permit.key in self._suspects())
        for key in self._deaths.keys() - self.position.open.keys():
            del self._deaths[key]
        count = len(lost) + self._batches.lose(owner)
        self._collect_dropped()
        self._log("lose", owner=owner, items=count)
        self._moved()
        return count

    def permits(self, owner: str) -> list[Permit]:
        """Those that an owner has."""
        return self._permits.of(owner)

    async def watch(self) -> None:
        """Looks for silent owners and for standstill until the run is over. Run it beside the others."""
        while self._vigil.period_s is not None and not self.is_over and self._failure is None:
            due = self._clock.now() + self._vigil.period_s
            await self._clock.sleep(self._vigil.period_s)
            self._vigil.excuse(self._clock.now() - due)
            for owner in self._vigil.silent(self._permits.waiting() | self._batches.waiting()):
                self.lose(owner)
            if self._vigil.is_still() and not self.is_over:
                self.fail(f"nothing has moved for watchdog_s={self.rules.watchdog_s:g}: {self.explain()}")

    def stop(self, why: str = STOPPED) -> None:
        """No item starts any more, and no batch is handed out: calls that wait return None.

        Args:
            why: A sentence for people. Where the run is over already, the first reason stays.
        """
        if not self.is_over:
            self._why_stopped = why
        self._moved()

    def fail(self, why: str) -> None:
        """The run cannot go on: every call that waits, and every later one, raises."""
        self._failure = why
        self._log("fail", why=why)
        self._moved()

    def close(self) -> None:
        self.stop()
        self.halt()

    def halt(self) -> None:
        """Leaves the journal to another controller: nothing more is written, as after a kill. Any thread may call it;
        it waits for writes that have begun."""
        if self._last_cut is not None:
            self._last_cut.close()
        self.buffer.close()

    # ---- insight -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.buffer.version

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do, or the run was stopped."""
        return self.why_over is not None

    @property
    def why_over(self) -> str | None:
        """Why no item starts and no batch is handed out any more, as a sentence. None where the run goes on."""
        if self._why_stopped is None and self.position.is_over:
            return self._why_no_item
        return self._why_stopped

    def capacity(self) -> int:
        """How many items may start now."""
        if self._leaving:
            return 0
        room, most = self.rules.limit - len(self._permits) - len(self.buffer), self.rules.max_running
        return room if most is None else min(room, most - len(self._permits))

    def explain(self) -> str:
        """Who waits for whom, in one sentence."""
        oldest, now, leases = self._permits.oldest(), self._clock.now(), self._batches.leases.values()
        state = State(
            limit=self.rules.limit,
            batch=self._next_count(),
            running=len(self._permits),
            longest_s=0.0 if oldest is None else now - oldest.began_s,
            slowest="" if oldest is None else oldest.owner,
            owners=len(self._permits.owners()),
            starters=len(self._permits.calls),
            held=len(self.buffer),
            ready=self.buffer.stats()["consumers"]["train"]["ready"],
            leased=self._batches.leased,
            learner_s=max((now - began for _, began in leases), default=0.0),
            takers=self._batches.takers,
            max_running=self.rules.max_running,
            has_next=self.position.has_next,
            why_over=self.why_over,
            lacking="; ".join(self.buffer.explain("train").split("\n  ")[1:2]),
        )
        return explain(state)

    def stats(self) -> dict[str, Any]:
        """Counts of items by outcome, what runs and waits, and the buffer's own numbers."""
        outcomes = {name: self.position.outcomes[name] for name in ("trained", "no_signal", "rejected")}
        return {
            **outcomes,
            "step": self.step,
            "version": self.version,
            "epoch": self.position.epoch,
            "running": len(self._permits),
            "waiting": len(self._permits.calls),
            "buffer": self.buffer.stats(),
        }

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _check(self, where: str, owner: str) -> None:
        if not isinstance(owner, str) or not owner:
            raise SchemaError(f"{where}: owner: expected a name, got {told(owner)}")
        if self._failure is not None:
            raise NotReady(f"{where}: {self._failure}")
        self.hear(owner)

    def _collect_dropped(self) -> None:
        """Items whose samples the buffer has thrown away, because they are too old, come again."""
        for key in self._dropped():
            self._log("stale", key=key)
            self._lose_item(key)

    def _dropped(self) -> list[str]:
        """Open items that are nowhere: neither at agents nor in the buffer nor to be handed out."""
        running = (permit.key for permit in self._permits.out.values())
        return self.position.missing({*self.buffer.ids(), *self._leaving, *running})

    def _lose_item(self, key: str, *, is_next: bool = False) -> None:
        if not self.position.lose(key, self.rules.max_losses, is_next=is_next):
            self._log("rejected", key=key, why=f"lost more than max_losses={self.rules.max_losses} times")

    def _moved(self) -> None:
        """Something changed: waiting calls that can go on do."""
        self._vigil.move()
        is_ending = self._failure is not None or self._why_stopped is not None or self.position.is_closed
        if self.position.empty_epoch is not None and not is_ending:
            self._end_empty_epoch(self.position.empty_epoch)
            return
        self._serve()
        self._batches.recount(None if self._failure is not None or self.is_over else self._next_count())

    def _end_empty_epoch(self, epoch: int) -> None:
        """Nothing was trained in an epoch, and the next one would be like it. The run ends: in order where it has
        trained before and no item failed, because then the model has learnt what these items teach; else it fails."""
        if self.position.outcomes["trained"] and not self.position.has_rejected:
            self._why_no_item = (
                f"All answers to each item have equal rewards, the last ones {self._equal_reward:g}: nothing is left "
                "to learn from. Give other items, a finer reward or skip_no_signal=False."
            )
            self._log("exhausted", why=self._why_no_item)
            self.position.close()  # items at agents and in the buffer are the last
            self._moved()
            return
        counts = ", ".join(f"{self.position.outcomes[name]} {name}" for name in ("no_signal", "rejected"))
        hint = "other items, a finer reward or skip_no_signal=False would mend it"
        if self._equal_reward is not None:
            hint = f"answers to the same item have equal rewards, the last ones {self._equal_reward:g}; {hint}"
        if self._why_rejected is not None and not self.position.outcomes["no_signal"]:
            hint = f"the last item was rejected because {self._why_rejected}"
        self.fail(f"epoch {epoch} is over and nothing was trained ({counts} so far); {hint}")

    def _serve(self) -> None:
        """Gives permits to waiting agents, first come first served."""
        calls = self._permits.calls
        while calls:
            is_ending = self._failure is not None or self.is_over
            if not is_ending and (self.capacity() < 1 or not self.position.has_next):
                return
            place = 0 if is_ending else self._next_call()
            if place is None:
                return
            owner, call = calls[place]
            del calls[place]
            if call.done():  # cancelled
                continue
            if self._failure is not None:
                call.set_exception(NotReady(f"start(): {self._failure}"))
            else:
                call.set_result(None if self.is_over else self._open(owner))

    def _next_call(self) -> int | None:
        """The place of the first waiting call whose owner may have the next item."""
        if not self._deaths:
            return 0
        suspects = self._suspects()
        is_suspect = self.position.peek() in suspects
        for place, (owner, _) in enumerate(self._permits.calls):
            mine = self._permits.of(owner)
            if not mine or not (is_suspect or any(permit.key in suspects for permit in mine)):
                return place
        return None

    def _suspects(self) -> set[str]:
        """Open items that may be why their owners died."""
        least = min(_SUSPECT, max(1, self.rules.max_losses))
        return {key for key, deaths in self._deaths.items() if deaths >= least and key in self.position.open}

    def _open(self, owner: str) -> Permit:
        key = self.position.next()
        _, name = Position.split(key)
        seed = derive_seed(self.rules.seed, key, self.position.open[key])
        oldest = max(0, self.version - self.rules.max_staleness)
        permit = self._permits.open(key, owner, self._items[name], oldest, seed, self._clock.now())
        self._vigil.hear(owner)
        self._vigil.move()
        self._log("start", key=key, owner=owner)
        return permit
