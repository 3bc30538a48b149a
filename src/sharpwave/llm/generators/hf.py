"""`HFGenerator`: transformers' continuous batching in this process, for architectures that `Transformer` lacks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import ClosedError, NotReady, SchemaError
from ..model.folder import read_state
from .answer import Answer
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
        if blocks < 1 or page < 4:
            raise SchemaError(f"HFGenerator(): blocks={blocks}, page={page}, expected at least 1 and 4")
        self.model, self.blocks, self.page, self.version = model, blocks, page, version
        config = model.config.get_text_config()
        self._vocabulary: int = config.vocab_size
        most = min(getattr(config, "max_position_embeddings", 1 << 30), blocks * page)
        if context is not None and not 1 <= context <= most:
            raise SchemaError(f"HFGenerator(): context={context}, expected 1 to {most}, what model and blocks can")
        self._context = most if context is None else context
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
        call = _Call(self._checked(ids, sampling), sampling, asyncio.get_running_loop().create_future())
        self._begin(call)
        try:
            return await call.done
        finally:
            self._drop(call)

    def _begin(self, call: _Call) -> None:
        if self._is_closed:
            raise ClosedError("HFGenerator was closed")
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
        given = self._checked(ids, Sampling(max_tokens=1), room=0)

        @torch.no_grad()
        def work() -> list[float]:
            with self._swap:
                tokens = torch.tensor([given], device=self.model.device)
                logs = self.model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return [float(one) for one in logs.gather(1, tokens[0, 1:, None])[:, 0]]

        return await asyncio.to_thread(work)

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        state = await asyncio.to_thread(read_state, path)
        self._check_state(state)
        loop = asyncio.get_running_loop()

        def swap() -> None:
            with self._swap, self._paused():
                if isinstance(version, bool) or not isinstance(version, int) or version <= self._written:
                    raise SchemaError(
                        f"update(): version={version!r}, but the model has {self._written}; versions only grow"
                    )
                self._write(state)
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
                    self._begin(call)

    def _check_state(self, state: dict[str, Tensor]) -> None:
        expected = dict(self.model.named_parameters())
        missing = [name for name in expected if name not in state]
        if missing:
            raise SchemaError(f"update(): {missing[0]} missing, {len(missing)} of {len(expected)} tensors")
        for name, parameter in expected.items():
            if state[name].shape != parameter.shape:
                raise SchemaError(
                    f"update(): {name} has shape {tuple(state[name].shape)}, expected {tuple(parameter.shape)}"
                )
            if not bool(torch.isfinite(state[name]).all()):
                raise SchemaError(f"update(): {name} has values that are NaN or infinite; the old weights stay")

    @torch.no_grad()
    def _write(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state[name])

    async def abort(self) -> int:
        calls = [call for call in self._calls.values() if not call.done.done()]
        for call in calls:
            self._finish(call, "abort")
        return len(calls)

    async def health(self) -> Health:
        for batch in self._batches.values():
            if not batch.is_running():
                raise NotReady(f"transformers' batching ended: {batch.background_thread_status.fatal_error}")
        begun = [bool(call.part.tokens) for call in self._calls.values()]
        return Health(self.version, running=sum(begun), waiting=len(begun) - sum(begun))

    async def close(self) -> None:
        await self.abort()
        await asyncio.sleep(0)
        self._is_closed = True
        for batch in self._batches.values():
            await asyncio.to_thread(batch.stop, hard_stop=True)

    def _batch(self, greedy: bool) -> Any:
        if greedy not in self._batches:
            from transformers import ContinuousBatchingConfig, GenerationConfig

            # Settings of a request count only where the batch has them, too; these are never used.
            drawn = {} if greedy else {"temperature": 0.5, "top_k": self._vocabulary, "top_p": 0.5}
            settings = GenerationConfig(do_sample=not greedy, eos_token_id=-1, **drawn)  # type: ignore[no-untyped-call]
            batch = self.model.init_continuous_batching(
                generation_config=settings,
                continuous_batching_config=ContinuousBatchingConfig(
                    return_logprobs=True,
                    per_request_processors=True,
                    num_blocks=self.blocks,  # None would take most of the machine's memory
                    page_size=self.page,
                    max_batch_tokens=256,
                    allow_block_sharing=False,  # blocks of the old weights would serve prompts of the new ones
                    use_async_batching=False,  # tokens in flight at a swap could not be told apart
                ),
            )
            batch.start()
            self._batches[greedy] = batch
        return self._batches[greedy]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for batch in list(self._batches.values()):
                stack.enter_context(batch.pause())
            yield

    def _checked(self, ids: Sequence[int], sampling: Sampling, room: int | None = None) -> list[int]:
        given = torch.as_tensor(ids) if len(ids) else torch.zeros(0)
        if given.ndim != 1 or not len(given) or given.dtype.is_floating_point:
            raise SchemaError(f"ids of shape {tuple(given.shape)} and dtype {given.dtype}, expected token ids")
        bad = (given < 0) | (given >= self._vocabulary)
        if bool(bad.any()):
            at = int(bad.int().argmax())
            raise SchemaError(f"ids[{at}]={int(given[at])}, expected 0 to {self._vocabulary - 1}")
        room = sampling.max_tokens if room is None else room
        if len(given) + room > self._context:
            raise SchemaError(
                f"a prompt of {len(given)} tokens and max_tokens={room} need {len(given) + room} places, there are "
                f"{self._context}; shorten the prompt, lower max_tokens or raise HFGenerator(context=, blocks=)"
            )
        unable = {"min_p": sampling.min_p > 0, "seed": sampling.seed is not None, "stop": bool(sampling.stop)}
        for name, is_set in unable.items():
            if is_set:
                raise SchemaError(f"Sampling({name}=): transformers' continuous batching has no such setting")
        return [int(one) for one in given]
