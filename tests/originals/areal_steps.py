"""AReaL's FunctionExecutor and ModelFunctionCall over some steps of PPO; what the buffer gave goes into a JSON file.

``python -m tests.originals.areal_steps upstream|ours FILE``. Only the other end of its request stream is ours: data
workers make prompts, model workers answer with the lengths of what they would have computed. Both are functions of the
step and of the ids, so two runs see the same data.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import uuid
import zlib
from pathlib import Path
from typing import Any

STEPS = 12
BATCH = 16
RESPONSES = 2  # of each prompt
TOKENS = ("packed_input_ids", "packed_logprobs", "prompt_mask")


def lengths(name: str) -> list[int]:
    """Of the responses to a prompt."""
    return [16 + zlib.crc32(f"{name}/{at}".encode()) % 1009 for at in range(RESPONSES)]


def output_lens(key: str, name: str) -> list[int]:
    whole = lengths(name)
    if key in ("rewards", "seq_no_eos_mask"):
        return [1] * RESPONSES
    return whole if key in ("packed_input_ids", "prompt_mask", "values") else [one - 1 for one in whole]


def calls(dfg: Any, config: Any) -> list[Any]:
    kind, impl = dfg.ModelInterfaceType, config.ModelInterfaceAbstraction
    train_keys = ("packed_input_ids", "packed_logprobs", "packed_ref_logprobs", "rewards", "values", "prompt_mask")
    generate = impl("ppo", {"generation_config": {"min_new_tokens": 1}})
    made = [
        dfg.MFCDef(
            name="actor_gen", n_seqs=BATCH, interface_type=kind.GENERATE, interface_impl=generate, model_name="actor",
            input_keys=("packed_prompts", "task_ids"), output_keys=(*TOKENS, "seq_no_eos_mask"),
        ),
        dfg.MFCDef(
            name="rew_inf", n_seqs=BATCH // 2, interface_type=kind.INFERENCE, interface_impl=impl("rew"),
            model_name="reward", input_keys=("packed_input_ids", "packed_prompts", "task_ids"),
            output_keys=("rewards",),
        ),
        dfg.MFCDef(
            name="ref_inf", n_seqs=BATCH, interface_type=kind.INFERENCE, interface_impl=impl("ref"),
            model_name="ref", input_keys=("packed_input_ids",), output_keys=("packed_ref_logprobs",),
        ),
        dfg.MFCDef(
            name="critic_inf", n_seqs=BATCH, interface_type=kind.INFERENCE, interface_impl=impl("critic"),
            model_name="critic", input_keys=("packed_input_ids", "seq_no_eos_mask"), output_keys=("values",),
        ),
        dfg.MFCDef(
            name="actor_train", n_seqs=BATCH, interface_type=kind.TRAIN_STEP, interface_impl=impl("ppo"),
            model_name=config.ModelName("actor", 1), input_keys=train_keys, log_return_value=True,
        ),
        dfg.MFCDef(
            name="critic_train", n_seqs=BATCH, interface_type=kind.TRAIN_STEP, interface_impl=impl("critic"),
            model_name=config.ModelName("critic", 0), input_keys=(*train_keys, "seq_no_eos_mask"),
        ),
    ]  # fmt: skip
    made[2].add_post_hook(dfg.OffloadHook())
    made[4].add_post_hook(dfg.ParamReallocHook(target=made[0].model_name))
    graph = dfg.build_graph(made)
    for one in made:
        one._G = graph
    return made


class Workers:
    """The data workers and the model workers, at the end of the request stream."""

    def __init__(self, data_api: Any, rpcs: list[Any], record: dict[str, Any]) -> None:
        self.data_api, self.rpcs, self.record = data_api, {rpc.name: rpc for rpc in rpcs}, record
        self.random = random.Random(7)
        self.replies: dict[uuid.UUID, Any] = {}
        self.loaded = 0

    def route_to(self, handler: str) -> int:
        return int(handler.strip("_").removeprefix("data"))

    def request(
        self, handlers: Any = None, handle_type: Any = None, datas: Any = None, payloads: Any = None, **_: Any
    ) -> list[uuid.UUID]:
        made = []
        if payloads is None:
            answers = [self.fetch(handler) if handle_type == "fetch" else None for handler in handlers]
        else:
            answers = [self.work(payload) for payload in payloads]
            self.record["requests"].append(
                sorted(
                    [str(payload.handler), payload.handle_name, *payload.pre_hooks, *payload.post_hooks]
                    for payload in payloads
                )
            )
        for answer in answers:
            made.append(uuid.uuid4())
            self.replies[made[-1]] = answer
        return made

    async def gather_async(self, request_ids: list[uuid.UUID], **_: Any) -> list[Any]:
        for _turn in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        return [self.replies.pop(one) for one in request_ids]

    async def call_async(self, handlers: Any, handle_type: str, datas: Any, **_: Any) -> list[Any]:
        return await self.gather_async(self.request(handlers, handle_type, datas))

    def fetch(self, handler: str) -> Any:
        """Some prompts of a data worker, or none."""
        chance = random.Random(self.loaded)
        count = chance.randrange(8)
        births = [1 + self.loaded * 100 + at for at in chance.sample(range(100), count)]
        names = [f"{handler}-{self.loaded}-{at}" for at in range(count)]
        self.loaded += 1
        if not count:
            return self.data_api.DataBatchMeta(dp_rank=self.route_to(handler), meta_sample=None, birth_times=[])
        import torch

        lens = [chance.randrange(3, 40) for _ in names]
        sample = self.data_api.SequenceSample.from_default(
            ids=names,
            seqlens=lens,
            data={
                "packed_prompts": torch.zeros(sum(lens), dtype=torch.long),
                "task_ids": torch.zeros(count, dtype=torch.long),
            },
            metadata={"source": [handler] * count},
        )
        return self.data_api.DataBatchMeta(
            dp_rank=self.route_to(handler), meta_sample=sample.meta(), birth_times=births
        )

    def work(self, payload: Any) -> Any:
        """A model worker's answer."""
        if payload.handle_name == "empty":
            return None
        rpc = self.rpcs[payload.data]
        transfer = payload.pre_hook_data[0]
        names = list(transfer["partitioned_ids"][payload.handler.dp_rank])
        shares = [len(part) for part in transfer["partitioned_ids"]]
        self.record["shares"].append([rpc.name, sorted(shares)])
        if rpc.is_train():
            return {"loss": float(len(transfer["meta_sample"].ids))}, {"train": 0.1}
        import torch

        keys = list(rpc.output_keys)
        sample = self.data_api.SequenceSample(
            keys=set(keys),
            trailing_shapes=dict.fromkeys(keys, ()),
            dtypes=dict.fromkeys(keys, torch.float32),
            ids=names,
            seqlens={key: [output_lens(key, name) for name in names] for key in keys},
            data=None,
            metadata={f"by_{rpc.name}": [len(name) for name in names]},
        )
        return sample, {rpc.name: 0.1}


def told(step: int, rpc: Any, slots: Any, batch: Any) -> dict[str, Any]:
    """A batch, as JSON has it."""
    return {
        "step": step,
        "call": rpc.name,
        "slots": [int(slot) for slot in slots],
        "ids": list(batch.ids),
        "seqlens": {key: [list(row) for row in rows] for key, rows in sorted(batch.seqlens.items())},
        "dtypes": {key: str(dtype) for key, dtype in sorted(batch.dtypes.items())},
        "trailing_shapes": {key: list(shape) for key, shape in sorted(batch.trailing_shapes.items())},
        "metadata": {name: list(values) for name, values in sorted(batch.metadata.items())},
        "data": batch.data is None,
    }


async def run(folder: Path) -> dict[str, Any]:
    import realhf.api.core.config as config
    import realhf.api.core.data_api as data_api
    import realhf.api.core.dfg as dfg
    from realhf.api.cli_args import BaseExperimentConfig, NameResolveConfig
    from realhf.base import constants, name_resolve, seeding, topology
    from realhf.system.buffer import AsyncIOSequenceBuffer
    from realhf.system.function_executor import FunctionExecutor
    from realhf.system.model_function_call import RPCCorountineControl

    seeding.set_random_seed(3, "originals")
    name_resolve.reconfigure(NameResolveConfig("nfs", str(folder)))
    constants.set_experiment_trial_names("originals", "areal")
    record: dict[str, Any] = {
        "classes": [AsyncIOSequenceBuffer.__module__, data_api.SequenceSample.__module__, dfg.MFCDef.__module__],
        "batches": [], "steps": [], "requests": [], "shares": [],
    }  # fmt: skip
    rpcs = calls(dfg, config)
    shapes = {  # pipeline, data, tensor
        ("actor", 0): (1, 2, 2), ("actor", 1): (2, 2, 1), ("critic", 0): (1, 4, 1), ("reward", 0): (1, 1, 1),
        ("ref", 0): (1, 4, 1),
    }  # fmt: skip
    topos: dict[Any, Any] = {}
    workers: dict[Any, int] = {}
    for (role, replica), (pipe, data, tensor) in shapes.items():
        name = config.ModelName(role, replica)
        topos[name] = topology.PipeDataTensorParallelTopology(pipe, tensor, data, False, False, False)
        for rank in range(topos[name].world_size()):
            workers[config.ModelShardID.from_parallelism_rank(name, topos[name], rank)] = rank
    sinks = [rpc for rpc in rpcs if rpc.is_dst]
    control = RPCCorountineControl(
        train_count=asyncio.Queue(len(sinks)), topo_level_count=asyncio.Queue(), lock=asyncio.Lock()
    )
    buffers = [AsyncIOSequenceBuffer(rpcs, 512) for _ in range(2)]
    for buffer in buffers:
        watch(buffer, control, record)
    executor = FunctionExecutor(
        args=BaseExperimentConfig(), rpcs=rpcs, msid2mwid=workers, stream=Workers(data_api, rpcs, record),
        buffers=buffers, model_topos=topos, model_configs=dict.fromkeys(topos), ctrl=control, summary_writer=None,
        shuffle_dataset=True,
    )  # fmt: skip
    for step in range(STEPS):
        control.step_info.global_step = step
        control.should_save = step % 3 == 0
        await asyncio.wait_for(executor.execute_step(), 60)
        for buffer in buffers:
            buffer._assert_valid_indicator()
        record["steps"].append(
            {
                "sizes": [buffer.size for buffer in buffers],
                "used": sorted(control.used_hash_vals_this_epoch),
                "owned": sorted(map(str, executor.storage_tracker.data_owner)),
                "flops": [control.flops_counter.train_seqlens, control.flops_counter.inf_seqlens],
            }
        )
        control.flops_counter.clear()
    return record


def watch(buffer: Any, control: Any, record: dict[str, Any]) -> None:
    """Writes down what a buffer gives."""
    real = buffer.get_batch_for_rpc

    async def get(rpc: Any) -> Any:
        slots, batch = await real(rpc)
        record["batches"].append(told(control.step_info.global_step, rpc, slots, batch))
        return slots, batch

    buffer.get_batch_for_rpc = get


def main() -> None:
    from . import areal_swap

    which, path = sys.argv[1:]
    del sys.argv[1:]  # AReaL reads the command line when it is imported
    areal_swap.stand_in()
    if which == "ours":
        areal_swap.swap()
    with tempfile.TemporaryDirectory() as folder:
        record = asyncio.run(run(Path(folder)))
    Path(path).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
