"""Triton's compiler for an H100 or H200 on what launches name, without a GPU; and what it made of a kernel.

monkeypatch.setattr(kernels, "Launch", Compiling)
monkeypatch.setattr(Compiling, "compiled", {})
... calls on meta tensors ...
for key, kernel in Compiling.compiled.items(): narrow_loads(kernel), resources(kernel)
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiling:
    """In place of a `graph_worth.capture.triton_launch.Launch`: compiles what a call would launch.

    compiled: by the kernel's name, its types and its constants.
    """

    compiled: ClassVar = {}

    def __init__(self, kernel, *fixed, **options):
        self.kernel, self.fixed, self.options = kernel, fixed, options

    def bound(self, grid, tensors, numbers=(), num_fresh=0):
        """Nothing can be launched."""

    def __call__(self, grid, tensors, numbers=()):
        names = self.kernel.arg_names
        options = {name: value for name, value in self.options.items() if name not in names}
        given = [*(NAMES[tensor.dtype] for tensor in tensors), *["i32"] * len(numbers)]
        signature, constants = dict(zip(names, given, strict=False)), {}
        # What is fixed: constants, and numbers that Triton makes arguments of unless they are 1.
        fixed = dict(zip(names[len(given) :], self.fixed, strict=False)) | self.options
        for parameter in self.kernel.params[len(given) :]:
            value = fixed[parameter.name]
            if parameter.is_constexpr or value == 1:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        # As at a launch on addresses of the allocator; numbers are not specialised.
        attributes = {(place,): [["tt.divisibility", 16]] for place in range(len(tensors))}
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.compiled[self.kernel.__name__, *signature.values(), *constants.values(), *options.values()] = compiled


def narrow_loads(compiled) -> list[str]:
    """The loads of one number of 16 bits or less."""
    return re.findall(r"ld\.global[\w.:]*\.b(?:8|16)\b", compiled.asm["ptx"])


def wide_accesses(compiled) -> tuple[int, int]:
    """(loads, stores) of 16 bytes at a time."""
    ptx = compiled.asm["ptx"]
    return tuple(len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32\b", ptx)) for kind in ("ld", "st"))


def resources(compiled) -> dict[str, int]:
    """REG: registers a thread; STACK and LOCAL: bytes of spills; SHARED: bytes a block."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        answer = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", answer.stdout)
    return {name: int(value) for name, value in found} | {"SHARED": compiled.metadata.shared}
