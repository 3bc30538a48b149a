"""``sharpwave generate serve``: an engine and its HTTP server as a process of its own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sharpwave as sw
from sharpwave.llm.generators import Engine, LocalGenerator
from sharpwave.llm.generators.mends import Mends
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.generators.server.generator_server import is_local
from sharpwave.llm.model import Transformer, load_model
from sharpwave.llm.model.config import DTYPES
from sharpwave.llm.parts import check_device
from sharpwave.llm.tokenizer import ChatTokenizer
from sharpwave.llm.weights import Weights, check_version

from .process_life import BadStart, stop_signals

__all__ = ["GeneratorOptions", "run_generator"]

_TRIES = 5  # a publisher may remove the newest version while it is read


@dataclass(frozen=True)
class GeneratorOptions:
    folder: Path
    host: str
    port: int
    key_file: Path | None
    name: str | None
    slots: int
    context: int | None
    chunk: int
    dtype: str | None
    device: str
    seed: int
    drain_s: float


def run_generator(options: GeneratorOptions) -> None:
    """Serves until SIGTERM or SIGINT, then ends in order.

    The first line of standard output is the address; a port 0 is replaced by the real one. At the first signal no new
    request is taken, running ones have `drain_s` seconds, and are then answered with the tokens they have. A second
    signal ends the process at once, as a kill does.

    Raises:
        BadStart: It could not begin.
        NotReady: The engine failed for good.
    """
    try:
        check_device("generate serve", options.device, "give --device cpu")
        key = _read_key(options.key_file)
        if key is None and not is_local(options.host):
            raise sw.errors.SchemaError(f"--host {options.host} is reached from other machines; give --key-file")
        model, tokenizer, version = _load(options)
        engine = Engine(
            model,
            slots=options.slots,
            context=options.context,
            chunk=options.chunk,
            version=version,
            seed=options.seed,
            tokenizer=tokenizer,
            mends=Mends(context="raise --context"),
        )
    except (sw.errors.SharpwaveError, OSError, RuntimeError) as error:  # RuntimeError: torch has no memory
        raise BadStart(f"{type(error).__name__}: {error}") from None
    asyncio.run(_serve(options, engine, tokenizer, key))


async def _serve(options: GeneratorOptions, engine: Engine, tokenizer: Any, key: str | None) -> None:
    async with LocalGenerator(engine) as generator:
        name = options.name or options.folder.resolve().name
        try:
            server = GeneratorServer(generator, tokenizer, host=options.host, port=options.port, key=key, name=name)
        except sw.errors.StorageError as error:  # of the address
            raise BadStart(f"StorageError: {error}; give another --port or --host") from None
        except sw.errors.SharpwaveError as error:
            raise BadStart(f"{type(error).__name__}: {error}") from None
        await server.start()
        with stop_signals() as stopped:
            try:
                print(server.address, flush=True)
                signal = asyncio.create_task(_until_readable(stopped))
                failure = asyncio.create_task(generator.join())
                await asyncio.wait({signal, failure}, return_when=asyncio.FIRST_COMPLETED)
                signal.cancel()
                if failure.done():
                    await failure
            finally:
                await server.close(options.drain_s)


async def _until_readable(descriptor: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


def find_model(folder: Path) -> tuple[Path, int]:
    """The Hugging Face folder to read and the version of its weights: the newest of a folder of versions.

    Raises:
        StorageError: There is no model, or its manifest is damaged.
    """
    if (folder / "config.json").is_file():
        manifest = folder / "manifest.json"
        return folder, _read_version(manifest) if manifest.is_file() else 0
    newest = Weights(folder).latest() if folder.is_dir() else None
    if newest is None:
        raise sw.errors.StorageError(f"{folder} has neither config.json nor a published version")
    if not (newest.path / "config.json").is_file() and newest.path.is_dir():
        raise sw.errors.StorageError(f"{newest.path} has no config.json; publish() a model, not its tensors alone")
    return newest.path, newest.version


def _read_version(manifest: Path) -> int:
    try:
        version = json.loads(manifest.read_text())["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise sw.errors.StorageError(f"{manifest} is damaged: {error!r}; expected an object with version") from error
    return check_version(str(manifest), version)


def _load(options: GeneratorOptions) -> tuple[Transformer, ChatTokenizer | None, int]:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise sw.errors.SchemaError(f"--dtype {options.dtype}, expected {', '.join(DTYPES)}")
    for tries in range(_TRIES, 0, -1):
        place, version = find_model(options.folder)
        try:
            tokenizer = ChatTokenizer.read(place) if (place / "tokenizer.json").is_file() else None
            return load_model(place, dtype=options.dtype, device=options.device), tokenizer, version
        except sw.errors.StorageError:
            if place.is_dir() or tries == 1:
                raise
    raise AssertionError


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    if path.stat().st_mode & 0o077:
        raise sw.errors.SchemaError(f"--key-file {path} can be read by other users; chmod 600 it")
    try:
        return path.read_text().strip()
    except ValueError as error:
        raise sw.errors.SchemaError(f"--key-file {path} is no text: {error}") from None
