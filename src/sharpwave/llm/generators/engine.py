"""`Engine`: answers of a model in slots, refilled as soon as an answer ends; weights change between two steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...checks import whole
from ...errors import SchemaError
from ..model.cache import KVCache
from ..model.folder import load_state
from ..model.transformer import Transformer
from ..weights import Published, check_version
from .answer import Request
from .decode import Ids, Meanwhile, decode_of, nothing
from .held_tokens import HeldTokens
from .intake import Intake
from .likelihood import check_tokens, log_probabilities
from .mends import Mends
from .prefill import prefill
from .sampler import Sampler
from .sampling import Sampling
from .slots import Slots
from .weight_stage import WeightStage

__all__ = ["Engine", "Step"]

_MOST_BEGINNINGS = 2  # of a score between which steps go on: weights may change faster than it is made


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
        context: Tokens of prompt and answer together; None for the model's `max_position_embeddings`.
        chunk: Prompt tokens computed in a step at most, so that long prompts do not hold up answers.
        version: The version of the model's weights; -1 for none that was published.
        seed: For requests without a seed.
        tokenizer: An object with `decode(ids, skip_special_tokens=)`; needed for `Sampling(stop=)`.
        timeline: Steps to remember.
        mends: Where users change the limits, for messages.

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
        mends: Mends | None = None,
    ) -> None:
        context = model.config.max_position_embeddings if context is None else context
        for name, value in (("slots", slots), ("context", context), ("chunk", chunk), ("timeline", timeline)):
            whole("Engine()", name, value)
        if context > model.config.max_context:
            raise SchemaError(
                f"Engine(): context={context}, but the model's max_position_embeddings is "
                f"{model.config.max_position_embeddings}, with its rope scaling {model.config.max_context}"
            )
        self.model, self.slots, self.context, self.chunk = model, slots, context, chunk
        self.version = check_version("Engine()", version, -1)
        self.timeline: deque[Step] = deque(maxlen=timeline)
        self._tokenizer, self._mends = tokenizer, Mends() if mends is None else mends
        self._cache = self._take_cache()
        self._held = HeldTokens(slots, context)
        self._sampler = Sampler(slots, model.device)
        self._stage = WeightStage(model)
        self._decode = decode_of(model, self._cache, self._sampler, chunk)
        self._slots = Slots(slots, context)
        self._request: list[Request | None] = [None] * slots
        self._idle: dict[int, None] = dict.fromkeys(range(slots))  # the longest idle first
        self._aborted: deque[Request] = deque()
        self._done: list[Request] = []  # since the last step, or before one that has raised
        self._intake = Intake(model.config, context, tokenizer, seed, self._mends)
        self._steps = 0
        # Who waits for the lock holds the door: steps that follow each other would else keep an update out.
        self._door, self._lock = threading.Lock(), threading.Lock()
        self._scoring = threading.Lock()  # taken before the others

    def _take_cache(self) -> KVCache:
        model = self.model
        try:
            return KVCache(model.config, self.slots, self.context, dtype=model.dtype, device=model.device)
        except RuntimeError as error:  # what torch raises where memory is short, on every device
            raise SchemaError(
                f"Engine(): slots={self.slots} and context={self.context} need {self.memory_bytes / 2**30:.1f} GiB for "
                f"keys and values, which {model.device} does not have; lower slots or context"
            ) from error

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
        return len(self._intake.waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._intake.waiting or self._aborted or self._done) or len(self._idle) < self.slots

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
        return self._intake.make(ids, Sampling() if sampling is None else sampling, n)

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Puts requests of `prepare` into the queue."""
        self._intake.waiting.extend(requests)  # without a lock: `deque.extend` is atomic

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
            SchemaError: Version, names, shapes or values are wrong, or the folder is of a model with other settings.
                The old weights stay.
            StorageError: The folder cannot be read, or is not what was published. The old weights stay.
        """
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        if isinstance(state, Published) and version is None:
            version = state.version
        version = check_version("update()", version)
        with self._stage.put(state, "update()") as ready, self._turn():
            if version <= self.version:
                raise SchemaError(f"update(): version={version}, but the engine has {self.version}; versions only grow")
            load_state(self.model, ready, "update()")
            self._stage.note_load()
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
        """Ends every request with the tokens it has (`stop` is "error"). For the caller of a step that has raised.

        Requests that were done before the step raised are handed out by the next step.
        """
        with self._turn():
            dropped = [request for request in self._request if request is not None]
            while self._intake.waiting:
                dropped.append(self._intake.waiting.popleft())
            self._aborted.clear()
            for request in dropped:  # before its slot forgets its tokens
                request.finish("error")
            self._request = [None] * self.slots
            self._idle = dict.fromkeys(range(self.slots))
            for slot in range(self.slots):
                self._slots.end(slot)
                self._sampler.clear(slot)
            self._forget()
        return dropped

    def score(self, ids: Sequence[int]) -> list[float]:
        """The model's log-probability of each token but the first, by the weights of now.

        Steps go on between pieces of `chunk` tokens. New weights in between begin it again; the third time it goes
        through in one turn. Meanwhile it takes the memory of `len(ids)` tokens in the cache; several scores follow each
        other.

        Raises:
            SchemaError: A token is not in the vocabulary, or there are more of them than the context.
        """
        tokens = check_tokens(ids, self.model.config.vocab_size, "score()", self._mends)
        if len(tokens) > self.context:
            raise SchemaError(f"score(): {len(tokens)} tokens, context={self.context}; {self._mends.context}")
        found: list[float] = []
        version, beginnings = None, 0
        with self._scoring:
            while len(found) < len(tokens) - 1:
                with self._turn():
                    if version != self.version:
                        found, version, beginnings = [], self.version, beginnings + 1
                        pieces = log_probabilities(self.model, tokens, self.chunk)
                    for piece in pieces if beginnings > _MOST_BEGINNINGS else islice(pieces, 1):
                        found += piece
        return found

    def _forget(self) -> None:
        for slot in range(self.slots):
            self._slots.ready[slot] = 0
            self._held.drop(slot, 0)

    @torch.no_grad()
    def step(self, meanwhile: Meanwhile = nothing) -> list[Request]:
        """Fills idle slots, computes at most `chunk` tokens of prompts and one token of each answer.

        Args:
            meanwhile: Called once; while a GPU decodes, if the step decodes. It may submit and abort requests.

        Returns:
            The requests that are done since the last step.
        """
        with self._turn():
            began = time.perf_counter_ns()
            self._end_aborted()
            copied = self._admit()
            waiting = len(self._intake.waiting)
            prompts = sorted(self._slots.filling().tolist(), key=lambda slot: self._of(slot).number)
            prefilled, more = prefill(prompts, self._slots, self._held, self._decode, self.chunk, self.version)
            # The last token is fed by the decode step, which samples the one after it.
            decoding = self._slots.decoding()
            filling = self.slots - len(self._idle) - len(decoding)
            idle = len(self._idle)
            if len(decoding):
                self._decode_step(decoding, meanwhile)
            else:
                meanwhile()
            done, self._done = self._done, []
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
            self._end_aborted()
            done, self._done = self._done, []
            return done

    def _end_aborted(self) -> None:
        if not self._aborted:
            return
        aborted = {self._aborted.popleft() for _ in range(len(self._aborted))}
        for slot, request in enumerate(self._request):
            if request in aborted:
                aborted.remove(request)
                self._end(slot, request, "abort")
        if not aborted:
            return
        for request in self._intake.withdraw(aborted):
            request.finish("abort")
            self._done.append(request)

    def _end(self, slot: int, request: Request, stop: str, matched: int | str | None = None) -> None:
        request.finish(stop, matched)
        self._request[slot] = None
        self._slots.end(slot)
        self._idle[slot] = None
        self._done.append(request)
        self._sampler.clear(slot)

    def _admit(self) -> int:
        """Gives idle slots to waiting requests, first come first served; a slot that holds a prompt gets it again."""
        copied = 0
        while self._idle and self._intake.waiting:
            request = self._intake.waiting[0]
            slot, ready = self._held.longest(request.prompt[:-1], self.version, self._idle)
            if not ready:
                slot = next(iter(self._idle))
            del self._idle[slot]
            # In a slot before anything may raise: `drop` ends what is in the queue or in a slot.
            self._request[slot] = self._intake.waiting.popleft()
            self._slots.begin(slot, request, ready)
            self._held.drop(slot, ready)
            self._sampler.set(slot, request.sampling, request.seed)
            copied += ready
        return copied

    def _decode_step(self, decoding: Ids, meanwhile: Meanwhile) -> None:
        """One token for each of these slots. The shapes are those of all slots; idle rows write behind the context."""
        slots = self._slots
        last = slots.count[decoding] - 1
        ids, places, counts = np.zeros((3, self.slots), np.int64)
        places[:] = self.context
        fed = ids[decoding] = slots.ids[decoding, last]
        places[decoding] = last
        counts[decoding] = last + 1 - slots.first[decoding]
        tokens, scores = self._decode.step(ids, places, counts, meanwhile)
        self._held.put_each(decoding, last, fed, self.version)
        slots.ready[decoding] = last + 1
        tokens, scores = tokens[decoding], scores[decoding]
        for at in slots.take(decoding, tokens, scores, self.version).tolist():
            slot = int(decoding[at])
            self._end_where_due(slot, self._of(slot), int(tokens[at]), bool(np.isfinite(scores[at])))

    def _of(self, slot: int) -> Request:
        request = self._request[slot]
        assert request is not None
        return request

    def _end_where_due(self, slot: int, request: Request, token: int, is_finite: bool) -> None:
        if not is_finite:
            self._end(slot, request, "error")
        elif token in request.stop_ids:
            self._end(slot, request, "stop", token)
        elif (found := self._stop_of_text(request)) is not None:
            self._end(slot, request, *found)
        elif request.count >= request.sampling.max_tokens:
            self._end(slot, request, "length")

    def _stop_of_text(self, request: Request) -> tuple[str, str | None] | None:
        """How the answer ends if the last token completed a stop string, or its text cannot be searched."""
        if not request.window:
            return None
        last = request.part(max(0, request.count - request.window), request.count)[0]
        try:
            text = self._tokenizer.decode(last, skip_special_tokens=False)
        except Exception:  # of a tokenizer that users give; the other answers of the step go on
            return "error", None
        matched = next((one for one in request.sampling.stop if one in text), None)
        return None if matched is None else ("stop", matched)
