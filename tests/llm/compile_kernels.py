"""Compiles every kernel for a Hopper GPU, with the arguments that its caller gives; prints a line for each."""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sharpwave.llm.kernels import attention, copies, draws, layers

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.double: "*fp64",
    torch.long: "*i64",
    torch.int32: "*i32",
}
KERNELS = {
    attention: ("_attend", "_add_parts"),
    copies: ("_copy_places",),
    draws: ("_weigh", "_choose"),
    layers: ("_add_and_norm", "_place_heads", "_gate"),
}


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.start

    def start(self, *arguments, **options):
        signature, constants = {}, {}
        for at, (name, one) in enumerate(zip(self.kernel.arg_names, arguments, strict=True)):
            is_constant = self.kernel.params[at].is_constexpr or one is None
            if is_constant:
                constants[(at,)] = one
            kind = TYPES[one.dtype] if isinstance(one, torch.Tensor) else "i32" if isinstance(one, int) else "fp32"
            signature[name] = "constexpr" if is_constant else kind
        made = compile(ASTSource(self.kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)
        print(self.kernel.__name__, len(made.asm["cubin"]), flush=True)


for module, names in KERNELS.items():
    for name in names:
        setattr(module, name, Compiled(getattr(module, name)))
torch.Tensor.is_cuda = property(lambda tensor: True)  # so that matrices are multiplied as on a GPU


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


keys, at = zeros(2, 2, 1025, 64), zeros(8, dtype=torch.long)
for parts in (1, 4):
    attention.attend(zeros(8, 14, 64), keys, keys, at, at, parts)
norms, angles = (zeros(64), zeros(64)), (zeros(1024, 64), zeros(1024, 64))
layers.place_heads(zeros(8, 18 * 64), norms, 1e-6, angles, keys, keys, at, at)
layers.add_and_norm(zeros(8, 896, dtype=torch.float32), zeros(8, 896), zeros(896), 1e-6)
layers.gate(zeros(8, 2 * 4864))
found = zeros(8, dtype=torch.int32), zeros(8, dtype=torch.float32)
draws.draw(zeros(8, 9000), zeros(8, dtype=torch.double), at, at, *found)
cache = zeros(2, 2, 2, 1025, 64)
copies.copy_places(cache, cache, zeros(3, 4, dtype=torch.long))
