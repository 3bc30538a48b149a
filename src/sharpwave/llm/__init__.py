"""Language models: training them by reinforcement learning, and generation. Needs the extra ``[llm]``.

Nothing here is imported by ``import sharpwave``. docs/how-to/train-a-language-model.md says how to use it, and
docs/rooms/llm.md what is inside.

    from sharpwave.llm import Experiment, LocalRun, RunFolder, RunLog
"""

from importlib import import_module
from typing import TYPE_CHECKING

try:
    import safetensors  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sharpwave.llm needs {error.name}; pip install sharpwave[llm]", name=error.name
    ) from error

if TYPE_CHECKING:
    from .agent import Generate, several_turns, single_turn
    from .agent_worker import AgentWorker
    from .characters import Characters
    from .checkpoints import Checkpoints
    from .controller import Controller
    from .episode import Episode
    from .evaluation import Evaluation
    from .experiment import Experiment
    from .generators.answer import Answer
    from .generators.engine import Engine
    from .generators.hf import HFGenerator
    from .generators.local import LocalGenerator
    from .generators.protocol import Generator
    from .generators.sampling import Sampling
    from .generators.server import GeneratorServer
    from .generators.sglang import SGLangClient, sglang_server
    from .generators.vllm import VLLMClient, sharpwave_server, vllm_server
    from .items import Item, Items
    from .learner import Learner, OptimizerConfig
    from .log import RunLog
    from .model import ModelConfig, Transformer, load_model, save_model, small_model, small_tokenizer
    from .objectives import GRPO, PPO, SFT
    from .openai_agent import session_agent
    from .rewards import Rewards
    from .rules import Rules
    from .run import LocalRun
    from .run_folder import RunFolder
    from .session import Session, SessionServer
    from .tasks import Task, load_task
    from .tokenizer import ChatTokenizer
    from .weights import Weights

__all__ = [
    "GRPO",
    "PPO",
    "SFT",
    "AgentWorker",
    "Answer",
    "Characters",
    "ChatTokenizer",
    "Checkpoints",
    "Controller",
    "Engine",
    "Episode",
    "Evaluation",
    "Experiment",
    "Generate",
    "Generator",
    "GeneratorServer",
    "HFGenerator",
    "Item",
    "Items",
    "Learner",
    "LocalGenerator",
    "LocalRun",
    "ModelConfig",
    "OptimizerConfig",
    "Rewards",
    "Rules",
    "RunFolder",
    "RunLog",
    "SGLangClient",
    "Sampling",
    "Session",
    "SessionServer",
    "Task",
    "Transformer",
    "VLLMClient",
    "Weights",
    "load_model",
    "load_task",
    "save_model",
    "session_agent",
    "several_turns",
    "sglang_server",
    "sharpwave_server",
    "single_turn",
    "small_model",
    "small_tokenizer",
    "vllm_server",
]

# Imported when first used: a server's process needs no learner, and an agent no server.
_LATER = {
    "AgentWorker": ".agent_worker",
    "Answer": ".generators.answer",
    "Characters": ".characters",
    "ChatTokenizer": ".tokenizer",
    "Checkpoints": ".checkpoints",
    "Controller": ".controller",
    "Engine": ".generators.engine",
    "Episode": ".episode",
    "Evaluation": ".evaluation",
    "Experiment": ".experiment",
    "GRPO": ".objectives",
    "Generate": ".agent",
    "Generator": ".generators.protocol",
    "GeneratorServer": ".generators.server",
    "HFGenerator": ".generators.hf",
    "Item": ".items",
    "Items": ".items",
    "Learner": ".learner",
    "LocalGenerator": ".generators.local",
    "LocalRun": ".run",
    "ModelConfig": ".model",
    "OptimizerConfig": ".learner",
    "PPO": ".objectives",
    "Rewards": ".rewards",
    "Rules": ".rules",
    "RunFolder": ".run_folder",
    "RunLog": ".log",
    "SFT": ".objectives",
    "SGLangClient": ".generators.sglang",
    "Sampling": ".generators.sampling",
    "Session": ".session",
    "SessionServer": ".session",
    "Task": ".tasks",
    "Transformer": ".model",
    "VLLMClient": ".generators.vllm",
    "Weights": ".weights",
    "load_model": ".model",
    "load_task": ".tasks",
    "save_model": ".model",
    "session_agent": ".openai_agent",
    "several_turns": ".agent",
    "sglang_server": ".generators.sglang",
    "sharpwave_server": ".generators.vllm",
    "single_turn": ".agent",
    "small_model": ".model",
    "small_tokenizer": ".model",
    "vllm_server": ".generators.vllm",
}

if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
