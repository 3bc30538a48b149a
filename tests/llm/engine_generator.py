"""An engine as a generator of one event loop, as simple as it can be: it steps between other coroutines."""

import asyncio
from pathlib import Path

from sharpwave.llm.generators import Health


class EngineGenerator:
    def __init__(self, engine):
        self.engine, self._answers = engine, {}

    async def run(self):
        while True:
            for request in self.engine.step() if self.engine.is_busy else ():
                answer = self._answers.pop(request.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(request.answer)
            await asyncio.sleep(0)

    async def generate(self, ids, sampling=None):
        [request] = self.engine.submit(ids, sampling)
        answer = self._answers[request.number] = asyncio.get_running_loop().create_future()
        return await answer

    async def update(self, path, version, *, kv="keep"):
        self.engine.update(Path(path), version, kv=kv)

    async def health(self):
        return Health(self.engine.version, 0, 0)
