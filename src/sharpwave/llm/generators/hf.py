"""`HFGenerator`: transformers' continuous batching in this process, for architectures that `Transformer` lacks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch

from ...checks import whole
from ...errors import ClosedError, NotReady, SchemaError
from ..weights import check_version
from .answer import Answer
from .hf_weights import own_tensors, read_weights
from .likelihood import check_tokens
from .partial import Partial
from .protocol import Health
from .sampling import Sampling

__all__ = ["HFGenerator"]


class _Call:
    """One answer on its way. Only the event loop changes it."""

    def __init__(self, prompt: list[int], sampling: Sampling, done: asyncio.Future[Answer]) -> None:
        self.prompt, self.sampling, self.done = prompt, sampling, done
        self.name = ""
        self.before = Partial()  # of earlier requests for the same answer
        self.part = Partial()  # of the request that runs


class HFGenerator:
    """A model of transformers behind the generator's calls. Needs transformers 5.22 or newer.

    transformers has no versions, so they are counted. Tokens and swaps reach the event loop in the order in which they
    happened: a token that arrives after a swap was made by the new weights.

    Args:
        model: A transformers model. The generator writes new weights into it.
        blocks: Blocks of its cache. Memory is taken for them at the first request.
        page: Tokens that a block holds for each layer.
        context: Tokens of prompt and answer together; None for what the model and the blocks can.
        version: The version of the model's weights.

    Example:
        generator = HFGenerator(AutoModelForCausalLM.from_pretrained(folder), blocks=256)
        answer = await generator.generate([5, 6, 7], Sampling(max_tokens=64))
    """

    def __init__(
        self, model: Any, *, blocks: int, page: int = 16, context: int | None = None, version: int = 0
    ) -> None:
        self.blocks, self.page = whole("HFGenerator()", "blocks", blocks), whole("HFGenerator()", "page", page, 4)
        self.version = check_version("HFGenerator()", version, -1)
        self.model = model
        self._config = deepcopy(model.config)  # passes write into the model's own
        config = model.config.get_text_config()
        self._vocabulary: int = config.vocab_size
        most = min(getattr(config, "max_position_embeddings", 1 << 30), blocks * page)
        self._context = most if context is None else whole("HFGenerator()", "context", context)
        if self._context > most:
            raise SchemaError(f"HFGenerator(): context={context}, expected at most {most}, what model and blocks can")
        given = model.generation_config.eos_token_id
        self._ends: list[int] = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        self._batches: dict[bool, Any] = {}  # by "takes the likeliest token", which transformers has for all or none
        self._calls: dict[str, _Call] = {}
        self._names = itertools.count()
        self._swap = threading.Lock()  # the weights are read, or written
        self._written = (
            version  # of the weights that are in the model; `version` follows when the event loop gets to it
        )
        self._is_closed = False

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        sampling = Sampling() if sampling is None else sampling
        call = _Call(self._checked("generate()", ids, sampling), sampling, asyncio.get_running_loop().create_future())
        try:
            self._begin(call)
            return await call.done
        finally:
            self._drop(call)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("HFGenerator was closed")

    def _begin(self, call: _Call) -> None:
        self._check_open()
        batch = self._batch(call.sampling.temperature == 0)
        call.name, call.part = f"sharpwave-{next(self._names)}", Partial()
        self._calls[call.name] = call
        left = call.before.rest(call.sampling)
        ends = [*left.stop_ids, *(() if left.ignore_eos else self._ends)]
        batch.register_result_handler(call.name, lambda output, name=call.name: self._take(name, output))
        settings: dict[str, Any] = {}
        if left.temperature > 0:
            settings = {"temperature": left.temperature, "top_k": left.top_k or self._vocabulary, "top_p": left.top_p}
        batch.add_request(
            [*call.prompt, *call.before.tokens],
            request_id=call.name,
            max_new_tokens=left.max_tokens,
            eos_token_id=ends or -1,
            streaming=True,
            **settings,
        )
        # After the request: those that are in the queue when the batching ends are told, later ones are dropped.
        if batch.background_thread_status.can_accept_new_requests() is not None:
            raise _ended(batch)

    def _take(self, name: str, output: Any) -> None:
        call = self._calls.get(name)
        if call is None or call.done.done():
            return
        had = len(call.part.tokens)
        call.part.add(output.generated_tokens[had:], output.logprobs[had:], self.version)
        if output.error is not None:
            call.done.set_exception(NotReady(f"transformers ended the request: {output.error}"))
        elif output.is_finished():
            del self._calls[name]
            ends = {*call.sampling.stop_ids, *(() if call.sampling.ignore_eos else self._ends)}
            last = call.part.tokens[-1] if call.part.tokens else None
            self._finish(call, *(("stop", last) if last in ends else ("length", None)))

    def _finish(self, call: _Call, stop: str, matched: int | None = None) -> None:
        call.before.extend(call.part)
        call.before.stop, call.before.matched = stop, matched
        call.done.set_result(call.before.answer())

    def _drop(self, call: _Call) -> None:
        """Forgets the request that runs for this answer, and ends it where it still does."""
        if self._calls.pop(call.name, None) is None or self._is_closed:
            return
        batch = self._batch(call.sampling.temperature == 0)
        batch.cancel_request(call.name)
        router = batch.output_router
        with router._lock:
            router.result_handlers.pop(call.name, None)
        # Tokens that were made before the request was ended have nowhere else to go.
        while not router.output_queue.empty():
            router.output_queue.get_nowait()

    async def score(self, ids: Sequence[int]) -> list[float]:
        self._check_open()
        given = self._checked("score()", ids, Sampling(max_tokens=1), room=0)

        @torch.no_grad()
        def work() -> list[float]:
            with self._alone():
                tokens = torch.tensor([given], device=self.model.device)
                logs = self.model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return [float(one) for one in logs.gather(1, tokens[0, 1:, None])[:, 0]]

        return await asyncio.to_thread(work)

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        version = check_version("update()", version)
        self._check_open()
        state = await asyncio.to_thread(read_weights, self.model, self._config, path)
        loop = asyncio.get_running_loop()

        @torch.no_grad()
        def swap() -> None:
            with self._swap, self._paused():
                if version <= self._written:
                    raise SchemaError(
                        f"update(): version={version}, but the model has {self._written}; versions only grow"
                    )
                for name, tensor in own_tensors(self.model).items():
                    tensor.copy_(state[name])
                self._written = version
                # After the tokens of the old weights, before those of the new ones.
                loop.call_soon_threadsafe(self._switch, version, kv)

        await asyncio.to_thread(swap)

    def _switch(self, version: int, kv: str) -> None:
        self.version = version
        if kv == "recompute":
            # For a request that is sent again, with its tokens so far in the prompt, all keys and values are computed.
            for call in list(self._calls.values()):
                if not call.done.done():
                    self._drop(call)
                    call.before.extend(call.part)
                    try:
                        self._begin(call)
                    except NotReady as error:
                        call.done.set_exception(error)

    async def abort(self) -> int:
        calls = [call for call in self._calls.values() if not call.done.done()]
        for call in calls:
            self._finish(call, "abort")
        return len(calls)

    async def health(self) -> Health:
        for batch in self._batches.values():
            if not batch.is_running():
                raise _ended(batch)
        begun = [bool(call.part.tokens) for call in self._calls.values()]
        return Health(self.version, running=sum(begun), waiting=len(begun) - sum(begun))

    async def close(self) -> None:
        await self.abort()
        await asyncio.sleep(0)
        self._is_closed = True
        for batch in self._batches.values():
            await asyncio.to_thread(batch.stop, hard_stop=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """For a forward pass of its own. A pass of the batches beside it would change it: transformers keeps in the
        model's config whether the attention of the current pass is causal. Attention that works with the batches' cache
        only is exchanged meanwhile.
        """
        with self._swap, self._paused():
            before = self.model.config._attn_implementation
            plain = before.removeprefix("paged|")
            if plain != before:
                self.model.set_attn_implementation(plain)
            try:
                yield
            finally:
                if plain != before:
                    self.model.set_attn_implementation(before)

    def _batch(self, greedy: bool) -> Any:
        if greedy not in self._batches:
            from transformers import ContinuousBatchingConfig, GenerationConfig

            # Settings of a request count only where the batch has them, too; these are never used.
            drawn = {} if greedy else {"temperature": 0.5, "top_k": self._vocabulary, "top_p": 0.5}
            settings = GenerationConfig(do_sample=not greedy, eos_token_id=-1, **drawn)
            config = ContinuousBatchingConfig(
                return_logprobs=True,
                per_request_processors=True,
                num_blocks=self.blocks,  # None would take most of the machine's memory
                page_size=self.page,
                max_batch_tokens=256,
                allow_block_sharing=False,  # blocks of the old weights would serve prompts of the new ones
                use_async_batching=False,  # tokens in flight at a swap could not be told apart
            )
            with self._swap:  # it may exchange the model's attention, as a score does
                batch = self.model.init_continuous_batching(
                    generation_config=settings, continuous_batching_config=config
                )
            batch.start()
            self._batches[greedy] = batch
        return self._batches[greedy]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for batch in list(self._batches.values()):
                try:
                    stack.enter_context(batch.pause())
                except RuntimeError as error:
                    raise _ended(batch) from error
            yield

    def _checked(self, where: str, ids: Sequence[int], sampling: Sampling, room: int | None = None) -> list[int]:
        given = check_tokens(ids, self._vocabulary, where)
        room = sampling.max_tokens if room is None else room
        if len(given) + room > self._context:
            raise SchemaError(
                f"{where}: a prompt of {len(given)} tokens and max_tokens={room} need {len(given) + room} places, "
                f"there are {self._context}; shorten the prompt, lower max_tokens or raise "
                "HFGenerator(context=, blocks=)"
            )
        unable = {"min_p": sampling.min_p > 0, "seed": sampling.seed is not None, "stop": bool(sampling.stop)}
        for name, is_set in unable.items():
            if is_set:
                raise SchemaError(f"Sampling({name}=): transformers' continuous batching has no such setting")
        listed: list[int] = given.tolist()
        return listed


def _ended(batch: Any) -> NotReady:
    status = batch.background_thread_status
    return NotReady(f"transformers' batching ended: {status.fatal_error or 'it is stopping'}")
