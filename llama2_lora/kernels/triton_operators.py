"""The operators of handwritten layers by Triton kernels (triton_kernels.py) and cuBLAS.

Same arithmetic and rounding as `operators.TorchOperators`, whose docstrings hold here. Sums of a row may be taken in
another order, and a sigmoid is FP32's to two units in the last place.
"""

import functools

import torch
import triton

from graph_worth import Launch
from llama2_lora.kernels import triton_kernels as kernels
from llama2_lora.kernels.torch_operators import Operators, writes_operand

BLOCK = 2048
TILE = 32


def launched(num_fresh: int = 0):
    """An operator of one launch, which the first call with some tensors prepares: later ones cost the host less.

    The implementation returns what `_launch` returns. An operator keeps the tensors that it has seen, but for the first
    num_fresh, which may be others in each call.
    """

    def decorate(implementation):
        @functools.wraps(implementation)
        def operator(self, *tensors, key=None, **options):
            fresh, static = tensors[:num_fresh], tensors[num_fresh:]
            # Numbers by value, tensors by identity: they are kept, so none can take the id of another.
            known = (implementation, self.threshold, key, *options, *map(id, options.values()), *map(id, static))
            if fresh:
                known += tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in fresh)
            if bound := self.bound.get(known):
                bound[0](*fresh)
                return
            numbers = {} if key is None else {"key": key}
            launch, *arguments = implementation(self, *tensors, **options, **numbers)
            launch(*arguments)
            if again := launch.bound(*arguments, num_fresh=num_fresh):
                self.bound[known] = again, static, options

        return operator

    return decorate


class TritonOperators(Operators):
    """Triton kernels, cuBLAS's FP8 GEMM and torch's bf16 one. CUDA; the kernels also in Triton's interpreter."""

    def __init__(self, config, formats, scaling, device):
        super().__init__(config, formats, scaling, device)
        self._launches, self.bound = {}, {}
        # Heads of a program of RoPE: a power of two that divides both.
        self._heads = config.kv_heads & -config.kv_heads

    def _launch(self, kernel, grid, tensors, numbers=(), written=None, **options):
        """(Launch, its grid, tensors, numbers). written: the operand's dtype, where it may be one or another; a Launch
        is made for the dtypes it has."""
        key = (id(kernel), written, *options.values())
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(kernel, **options)
        return launch, (*grid, 1, 1)[:3], tensors, numbers

    def _operand(self, written, otherwise):
        """(tensor, scale, amax), constants of what writes an operand; of none they are any tensors."""
        tensor, scale, amax, _ = written or (otherwise, self.one, self.unused, None)
        return (tensor, scale, amax), {"RECORD": written is not None and amax is not self.unused}

    @property
    def _dropout(self):
        return {"THRESHOLD": self.threshold, "KEEP_SCALE": self.keep_scale}

    def _rows(self, x):
        """Constants of a program a row."""
        width = x.shape[1]
        block, warps = triton.next_power_of_2(width), 16 if width > 4096 else 4
        return {"WIDTH": width, "BLOCK": block, "EPS": self.config.norm_eps, "num_warps": warps}

    @launched()
    @writes_operand
    def norm(self, x, gain, written, add=None, total=None, dropped=None, key=0, plain=None):
        (tensor, scale, amax), recording = self._operand(written, x)
        total_or_any, dropped_or_any, plain_or_any = (x if out is None else out for out in (total, dropped, plain))
        tensors = (x, x if add is None else add, gain, total_or_any, tensor, dropped_or_any, plain_or_any, scale, amax)
        uses = {"ADD": add is not None, "OPERAND": bool(written), "DROPPED": dropped is not None}
        uses["PLAIN"] = plain is not None
        constants = {**self._rows(x), **uses, **recording, **self._dropout}
        return self._launch(kernels.norm, (x.shape[0],), (*tensors, self.step), (key,), tensor.dtype, **constants)

    @launched()
    @writes_operand
    def norm_backward(self, grad, x, gain, out, written, through_dropout=None, key=0, residual=None):
        (tensor, scale, amax), recording = self._operand(written, x)
        through, residual_or_any = (x if gradient is None else gradient for gradient in (through_dropout, residual))
        tensors = (grad, through, x, gain, residual_or_any, out, tensor, scale, amax, self.step)
        uses = {"THROUGH": through_dropout is not None, "RESIDUAL": residual is not None, "OPERAND": bool(written)}
        constants = {**self._rows(x), **uses, **recording, **self._dropout}
        return self._launch(kernels.norm_backward, (x.shape[0],), tensors, (key,), tensor.dtype, **constants)

    @launched(num_fresh=1)
    @writes_operand
    def quantize(self, x, written, dropped=None, key=0):
        (tensor, scale, amax), recording = self._operand(written, x)
        tensors = (x, tensor, x if dropped is None else dropped, scale, amax, self.step)
        uses = {"WIDTH": x.shape[1], "BLOCK": BLOCK, "OPERAND": bool(written), "DROPPED": dropped is not None}
        grid = (x.shape[0], triton.cdiv(x.shape[1], BLOCK))
        constants = {**uses, **recording, **self._dropout, "num_warps": 8}
        return self._launch(kernels.quantize, grid, tensors, (key,), tensor.dtype, **constants)

    @launched()
    def add_dropout_gradient(self, grad, through_dropout, key):
        count, tensors = grad.numel(), (grad, through_dropout, self.step)
        constants = {"COUNT": count, "BLOCK": BLOCK, **self._dropout, "num_warps": 4}
        return self._launch(kernels.add_dropout_gradient, (triton.cdiv(count, BLOCK),), tensors, (key,), **constants)

    @launched()
    def rope(self, qkv, positions):
        c = self.config
        grid = (c.tokens, (c.heads + c.kv_heads) // self._heads)
        constants = {"WIDTH": c.qkv_width, "HEADS": self._heads, "HALF": c.head_dim // 2, "num_warps": 4}
        return self._launch(kernels.rope, grid, (qkv, self.cos, self.sin, positions), **constants)

    @launched(num_fresh=3)
    @writes_operand
    def rope_backward(self, grad_q, grad_k, grad_v, positions, out, written):
        c, grads = self.config, (grad_q, grad_k, grad_v)
        operand, recording = self._operand(written, out)
        assert all(grad.stride(2) == 1 for grad in grads)
        strides = {
            f"{name}_{what}": grad.stride(dim)
            for name, grad in zip("QKV", grads, strict=True)
            for dim, what in enumerate(("HEAD", "ROW"))
        }
        grid = (c.tokens, (c.heads + 2 * c.kv_heads) // self._heads)
        tensors = (*grads, self.cos, self.sin, positions, out, *operand)
        constants = {"NUM_Q": c.heads // self._heads, "HEADS": self._heads, "HALF": c.head_dim // 2, **recording}
        constants |= {"WIDTH": c.qkv_width, "num_warps": 4}
        return self._launch(kernels.rope_backward, grid, tensors, (), operand[0].dtype, **strides, **constants)

    @launched()
    @writes_operand
    def swiglu(self, fc1, written, stored_slot=None, stored=None):
        rows, ffn = fc1.shape[0], fc1.shape[1] // 2
        (tensor, scale, amax), recording = self._operand(written, fc1)
        stored_scale, stored_amax = (stored_slot.scale, stored_slot.amax) if stored_slot else (self.one, self.unused)
        tensors = (fc1, tensor, fc1 if stored is None else stored, scale, amax, stored_scale, stored_amax)
        uses = {"MEASURE": stored_slot is not None, "STORE": stored is not None}
        constants = {"FFN": ffn, "BLOCK": BLOCK, **recording, **uses, "num_warps": 4}
        return self._launch(kernels.swiglu, (rows, triton.cdiv(ffn, BLOCK)), tensors, (), tensor.dtype, **constants)

    @launched()
    @writes_operand
    def swiglu_backward(self, fc1, grad, written, stored_slot=None):
        rows, ffn = grad.shape
        operand, recording = self._operand(written, fc1)
        stored_scale, inverse = (stored_slot.scale, stored_slot.inverse) if stored_slot else (self.one, self.one)
        is_stored = stored_slot is not None
        uses = {"ROUND": is_stored and fc1.dtype != torch.float8_e4m3fn, "DEQUANTIZE": is_stored}
        constants = {"FFN": ffn, "BLOCK": BLOCK, **recording, **uses, "num_warps": 4}
        tensors, grid = (fc1, grad, *operand, stored_scale, inverse), (rows, triton.cdiv(ffn, BLOCK))
        return self._launch(kernels.swiglu_backward, grid, tensors, (), operand[0].dtype, **constants)

    @launched()
    def cross_entropy(self, logits, targets, weights, losses):
        rows, vocab = logits.shape
        constants = {"VOCAB": vocab, "BLOCK": min(triton.next_power_of_2(vocab), 8192), "num_warps": 8}
        return self._launch(kernels.cross_entropy, (rows,), (logits, targets, weights, losses), **constants)

    def transpose(self, weight, out):
        rows, columns = weight.shape
        if rows % (4 * TILE) or columns % (4 * TILE):
            out.view(torch.uint8).copy_(weight.view(torch.uint8).t())
            return
        grid = (columns // 4 // TILE, rows // 4 // TILE)
        tensors = (weight.view(torch.int32), out.view(torch.int32))
        constants = {"ROWS": rows // 4, "COLUMNS": columns // 4, "TILE": TILE, "num_warps": 4}
        launch, *arguments = self._launch(kernels.transpose, grid, tensors, **constants)
        launch(*arguments)

    def gemm(self, a, b, scale_a, scale_b, out, fast):
        """fast: sums of products in the tensor core's own precision, as usual forward; else promoted to FP32."""
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
            return
        torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)
