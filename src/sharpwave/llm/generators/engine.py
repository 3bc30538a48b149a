"""`Engine`: answers of a model in slots, refilled as soon as an answer ends; weights change between two steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import SchemaError
from ..model.cache import KVCache
from ..model.folder import load_state, read_state
from ..model.transformer import Transformer
from ..weights import Published
from .answer import Request
from .decode import Ids, decode_of
from .held_tokens import HeldTokens
from .likelihood import check_tokens, log_probabilities
from .sampler import Sampler
from .sampling import Sampling
from .slots import Slots
from .weight_stage import WeightStage

__all__ = ["Engine", "Step"]


class Step(NamedTuple):
    """One line of the timeline. Slots are decoding, filling (their prompt is being computed) or idle."""

    number: int
    began_ns: int
    took_ns: int
    decoding: int
    filling: int
    idle: int
    waiting: int  # requests that have no slot after this step's admission
    prefilled: int  # tokens
    copied: int  # tokens whose keys and values came from another slot or an earlier request
    finished: int
    version: int


class Engine:
    """Continuous batching over `slots` sequences of at most `context` tokens. Memory is taken here and never again.

    One thread calls `step()`; `submit`, `abort` and `update` may be called from any thread.

    Args:
        model: The engine uses it and writes new weights into it: a learner in the same process needs its own.
        slots: Answers that are generated side by side.
        context: Tokens of prompt and answer together; None for what the model can.
        chunk: Prompt tokens computed in a step at most, so that long prompts do not hold up answers.
        version: The version of the model's weights.
        seed: For requests without a seed.
        tokenizer: An object with `decode(ids, skip_special_tokens=)`; needed for `Sampling(stop=)`.
        timeline: Steps to remember.

    Example:
        >>> from sharpwave.llm.model import small_model
        >>> engine = Engine(small_model(), slots=4, context=64)
        >>> requests = engine.submit([5, 6, 7], Sampling(max_tokens=8), n=4)
        >>> engine.run()
        >>> len(requests[0].answer.versions) <= 8
        True
    """

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int = 8,
        context: int | None = None,
        chunk: int = 256,
        version: int = 0,
        seed: int = 0,
        tokenizer: Any = None,
        timeline: int = 4096,
    ) -> None:
        most = model.config.max_position_embeddings
        context = most if context is None else context
        for name, value in (("slots", slots), ("context", context), ("chunk", chunk), ("timeline", timeline)):
            if value < 1:
                raise SchemaError(f"Engine(): {name}={value}, expected at least 1")
        if context > most:
            raise SchemaError(f"Engine(): context={context}, but the model's max_position_embeddings is {most}")
        self.model, self.slots, self.context, self.chunk = model, slots, context, chunk
        self.version = version
        self.timeline: deque[Step] = deque(maxlen=timeline)
        self._tokenizer = tokenizer
        self._cache = KVCache(model.config, slots, context, dtype=model.dtype, device=model.device)
        self._held = HeldTokens(slots, context)
        self._sampler = Sampler(slots, model.device)
        self._stage = WeightStage(model)
        self._decode = decode_of(model, self._cache, self._sampler, chunk)
        self._slots = Slots(slots, context)
        self._request: list[Request | None] = [None] * slots
        self._idle: deque[int] = deque(range(slots))  # the longest idle first
        self._waiting: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._random = np.random.default_rng(seed)
        self._numbers = 0
        self._steps = 0
        # Who waits for the lock holds the door: steps that follow each other would else keep an update out.
        self._door, self._lock, self._intake = threading.Lock(), threading.Lock(), threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """The memory of the cache."""
        return KVCache.count_bytes(self.model.config, self.slots, self.context, self.model.dtype)

    @property
    def running(self) -> int:
        """Slots in use."""
        return self.slots - len(self._idle)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._waiting or self._aborted) or len(self._idle) < self.slots

    def submit(self, ids: Sequence[int], sampling: Sampling | None = None, *, n: int = 1) -> list[Request]:
        """Asks for `n` answers to a prompt, which is computed once for all of them.

        With `Sampling(seed=)` answer i has seed + i.

        Raises:
            SchemaError: A token is not in the vocabulary, or prompt and answer do not fit. Nothing was taken.
        """
        made = self.prepare(ids, sampling, n=n)
        self.enqueue(made)
        return made

    def prepare(self, ids: Sequence[int] | Ids, sampling: Sampling | None = None, *, n: int = 1) -> list[Request]:
        """Checks requests as `submit` does, and makes them without putting them into the queue."""
        sampling = Sampling() if sampling is None else sampling
        prompt = self._check_prompt(ids, sampling)
        if n < 1:
            raise SchemaError(f"submit(): n={n}, expected at least 1")
        if sampling.stop and self._tokenizer is None:
            raise SchemaError(f"submit(): stop={sampling.stop} needs a tokenizer; give Engine(tokenizer=)")
        ends = frozenset(sampling.stop_ids) | frozenset(() if sampling.ignore_eos else self.model.config.eos_ids)
        made = []
        with self._intake:
            for member in range(n):
                given = sampling.seed
                seed = int(self._random.integers(2**63)) if given is None else (given + member) % 2**63
                made.append(Request(self._numbers, prompt, sampling, seed, ends))
                self._numbers += 1
        return made

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Puts requests of `prepare` into the queue."""
        self._waiting.extend(requests)  # without a lock: one call of a deque is whole for every thread

    def _check_prompt(self, ids: Sequence[int] | Ids, sampling: Sampling) -> Ids:
        given = check_tokens(ids, self.model.config.vocab_size, "submit()")
        if len(given) + sampling.max_tokens > self.context:
            raise SchemaError(
                f"submit(): a prompt of {len(given)} tokens and max_tokens={sampling.max_tokens} need "
                f"{len(given) + sampling.max_tokens} places, context={self.context}; shorten the prompt, lower "
                "max_tokens or raise Engine(context=)"
            )
        return given

    def abort(self, request: Request) -> None:
        """Ends a request at the next step with the tokens it has. One that is done, or of another engine, is left."""
        self._aborted.append(request)

    def update(
        self,
        state: Mapping[str, Tensor] | str | Path | Published,
        version: int | None = None,
        *,
        kv: Literal["keep", "recompute"] = "keep",
    ) -> None:
        """Puts new weights in between two steps. Answers go on: later tokens are made by the new version.

        Args:
            state: Tensors by name, a Hugging Face folder, or a version of `Weights`.
            version: Above the current one; that of a published version is its own.
            kv: "keep" goes on over the keys and values of the old weights, at no cost; "recompute" computes them again,
                so that later log-probabilities equal a forward pass of the new weights. It costs as many tokens of
                prefill as the slots hold, at most `chunk` a step.

        Raises:
            SchemaError: Version, names, shapes or values are wrong. The old weights stay.
            StorageError: The folder cannot be read. The old weights stay.
        """
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        if isinstance(state, Published):
            version = state.version if version is None else version
            state = state.read()
        elif isinstance(state, (str, Path)):
            state = read_state(state)
        with self._stage.put(state, "update()") as ready, self._turn():
            if version is None or version <= self.version:
                raise SchemaError(f"update(): version={version}, but the engine has {self.version}; versions only grow")
            load_state(self.model, ready, "update()")
            self.version = version
            if kv == "recompute":
                self._slots.ready[:] = 0

    def run(self, steps: int | None = None) -> None:
        """Steps until nothing is left to do, or so many times."""
        while self.is_busy and (steps is None or steps > 0):
            self.step()
            steps = None if steps is None else steps - 1

    def clear_cache(self) -> None:
        """Forgets all keys and values. Those of answers on their way are computed again."""
        with self._door, self._lock:
            self._forget()

    def drop(self) -> list[Request]:
        """Ends every request with the tokens it has (`stop` is "error"). For the caller of a step that has raised."""
        with self._turn():
            dropped = [request for request in self._request if request is not None]
            while self._waiting:
                dropped.append(self._waiting.popleft())
            self._aborted.clear()
            for request in dropped:  # before its slot forgets its tokens
                request.finish("error")
            self._request = [None] * self.slots
            self._idle = deque(range(self.slots))
            for slot in range(self.slots):
                self._slots.end(slot)
                self._sampler.clear(slot)
            self._forget()
        return dropped

    def score(self, ids: Sequence[int]) -> list[float]:
        """The model's log-probability of each token but the first, by the weights of now. One pass between two steps.

        Raises:
            SchemaError: A token is not in the vocabulary, or there are more of them than the context.
        """
        tokens = check_tokens(ids, self.model.config.vocab_size, "score()")
        if len(tokens) > self.context:
            raise SchemaError(f"score(): {len(tokens)} tokens, context={self.context}; raise Engine(context=)")
        with self._turn():
            return log_probabilities(self.model, tokens)

    def _forget(self) -> None:
        for slot in range(self.slots):
            self._slots.ready[slot] = 0
            self._held.drop(slot, 0)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Fills idle slots, computes at most `chunk` tokens of prompts and one token of each answer.

        Returns:
            The requests that are done since the last step.
        """
        with self._turn():
            began = time.perf_counter_ns()
            done = self._end_aborted()
            copied = self._admit()
            waiting = len(self._waiting)
            prefilled, more = self._fill()
            # The last token is fed by the decode step, which samples the one after it.
            decoding = self._slots.decoding()
            filling = self.slots - len(self._idle) - len(decoding)
            idle = len(self._idle)
            if len(decoding):
                done += self._decode_step(decoding)
            took, copied = time.perf_counter_ns() - began, copied + more
            slots = (len(decoding), filling, idle)
            self.timeline.append(
                Step(self._steps, began, took, *slots, waiting, prefilled, copied, len(done), self.version)
            )
            self._steps += 1
        return done

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._door:
            self._lock.acquire()
        try:
            with torch.cuda.stream(self._decode.stream):  # None changes nothing
                yield
        finally:
            self._lock.release()

    def end_aborted(self) -> list[Request]:
        """Ends aborted requests without a step, for a time in which there is none. Returns them."""
        with self._turn():
            return self._end_aborted()

    def _end_aborted(self) -> list[Request]:
        done = []
        while self._aborted:
            request = self._aborted.popleft()
            if request in self._request:
                self._end(self._request.index(request), request, "abort")
            elif request in self._waiting:
                self._waiting.remove(request)
                request.finish("abort")
            else:
                continue
            done.append(request)
        return done

    def _end(self, slot: int, request: Request, stop: str, matched: int | str | None = None) -> None:
        request.finish(stop, matched)
        self._request[slot] = None
        self._slots.end(slot)
        self._idle.append(slot)
        self._sampler.clear(slot)

    def _admit(self) -> int:
        """Gives idle slots to waiting requests, first come first served; a slot that holds a prompt gets it again."""
        copied = 0
        while self._idle and self._waiting:
            request = self._waiting.popleft()
            shared = self._held.shared(request.prompt[:-1], self.version)
            idle = np.fromiter(self._idle, np.int64)
            slot = int(idle[shared[idle].argmax()])  # the first of equals: the longest idle
            self._idle.remove(slot)
            self._slots.begin(slot, request, int(shared[slot]))
            self._held.drop(slot, int(shared[slot]))
            self._request[slot] = request
            self._sampler.set(slot, request.sampling, request.seed)
            copied += int(shared[slot])
        return copied

    def _fill(self) -> tuple[int, int]:
        """Computes keys and values of prompts, the oldest request first. Returns tokens computed and copied."""
        budget, copied = self.chunk, 0
        unfinished: list[int] = []
        slots = self._slots
        for slot in sorted(slots.filling().tolist(), key=lambda one: self._of(one).number):
            if budget == 0:  # the others wait for the next step, so that a step looks at few of many prompts
                break
            copied += self._copy_shared(slot)
            if slots.is_ready(slot):
                continue
            # A request of the same group is on it: its keys and values are copied when they are there.
            if any(self._common(slot, other) > slots.ready[slot] for other in unfinished):
                continue
            start = int(slots.ready[slot])
            end = min(int(slots.count[slot]) - 1, start + budget)
            self._decode.fill(slot, start, slots.ids[slot, start:end])
            self._held.put(slot, start, slots.ids[slot, start:end], self.version)
            slots.ready[slot] = end
            budget -= end - start
            if not slots.is_ready(slot):
                unfinished.append(slot)
        self._decode.flush()
        return self.chunk - budget, copied

    def _copy_shared(self, slot: int) -> int:
        """Takes over what another slot holds of this one's tokens."""
        slots = self._slots
        shared = self._held.shared(slots.ids[slot, : slots.count[slot] - 1], self.version)
        source = int(shared.argmax())
        start, end = min(int(slots.ready[slot]), int(shared[slot])), int(shared[source])
        if source == slot or end <= slots.ready[slot]:
            return 0
        self._decode.copy(source, slot, start, end)
        self._held.drop(slot, start)
        self._held.put(slot, start, slots.ids[slot, start:end], self.version)
        slots.ready[slot] = end
        return end - start

    def _common(self, slot: int, other: int) -> int:
        """How many tokens the two sequences begin with together, of those that both need in the cache."""
        slots = self._slots
        size = int(min(slots.count[slot], slots.count[other])) - 1
        same = slots.ids[slot, :size] == slots.ids[other, :size]
        return size if same.all() else int(same.argmin())

    def _decode_step(self, decoding: Ids) -> list[Request]:
        """One token for each of these slots. The shapes are those of all slots; idle rows write behind the context."""
        slots = self._slots
        last = slots.count[decoding] - 1
        ids, places, counts = np.zeros((3, self.slots), np.int64)
        places[:] = self.context
        fed = ids[decoding] = slots.ids[decoding, last]
        places[decoding] = last
        counts[decoding] = last + 1 - slots.first[decoding]
        tokens, scores = self._decode.step(ids, places, counts)
        self._held.put_each(decoding, last, fed, self.version)
        slots.ready[decoding] = last + 1
        tokens, scores = tokens[decoding], scores[decoding]
        done = []
        for at in slots.take(decoding, tokens, scores, self.version).tolist():
            slot = int(decoding[at])
            request = self._of(slot)
            self._end_where_due(slot, request, int(tokens[at]), bool(np.isfinite(scores[at])))
            if request.answer is not None:
                done.append(request)
        return done

    def _of(self, slot: int) -> Request:
        request = self._request[slot]
        assert request is not None
        return request

    def _end_where_due(self, slot: int, request: Request, token: int, is_finite: bool) -> None:
        if not is_finite:
            self._end(slot, request, "error")
        elif token in request.stop_ids:
            self._end(slot, request, "stop", token)
        elif (matched := self._matched(request)) is not None:
            self._end(slot, request, "stop", matched)
        elif request.count >= request.sampling.max_tokens:
            self._end(slot, request, "length")

    def _matched(self, request: Request) -> str | None:
        """The stop string that the last token completed."""
        if not request.sampling.stop:
            return None
        # A token is at least one byte; some more, because the first of them may be the rest of a character.
        window = max(len(one.encode()) for one in request.sampling.stop) + 4
        last = request.part(max(0, request.count - window), request.count)[0]
        text = self._tokenizer.decode(last, skip_special_tokens=False)
        return next((one for one in request.sampling.stop if one in text), None)
