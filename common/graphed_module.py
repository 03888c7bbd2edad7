"""A module as two graphs, forward and backward, behind one autograd.Function.

    graphed = GraphedModule(module, (x,), Pool(device))
    loss = head(graphed(x)); loss.backward()          # anything may come before and after

What `torch.cuda.make_graphed_callables` does, with three differences. Nothing is aliased silently: its
returned parameter gradients are the graph's own buffers, which autograd may install as `.grad` and the
next replay overwrites (pytorch issue 181723). A backward that comes too late, after the next forward
replay, is an error here and not a wrong gradient. And there is no fall-back to eager, for no reason.
"""

import torch

from common.capture import CaptureError, Pool


class GraphedModule:
    """Callable with the module's positional tensor arguments; the result is part of the autograd graph.

    module: nn.Module whose parameters keep their addresses. sample_args: tensors with the shapes, dtypes
    and requires_grad of later calls. pool: the graphs' `Pool`, one for each module: two modules in one pool
    are right only if each one's backward runs before the other's forward, the order of their capture.

    accumulate: False returns parameter gradients to autograd as copies, so that hooks, `.grad = None` and
    accumulation work as usual. True adds them to `param.main_grad`, or else `param.grad`, inside the
    backward graph: no copy, but the buffer must exist before the capture and stay where it is.
    copies: False hands out the static outputs and input gradients themselves, valid until the next call;
    True (default) hands out copies that stay valid.

    Raises CaptureError where the module does what no graph can hold; ValueError for a call that does not
    fit the capture (shape, dtype, training mode, replaced accumulation buffer).
    """

    def __init__(self, module, sample_args, pool: Pool, accumulate=False, copies=True, num_warmup=3):
        self.module, self.accumulate, self.copies = module, accumulate, copies
        self.training = module.training
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.inputs = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in sample_args]
        self.num_calls = 0
        if accumulate:
            self._buffers = [_accumulation_buffer(parameter) for parameter in self.parameters]
            self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._warm_up(num_warmup)
        self.forward_graph, outputs = pool.capture(lambda: _as_tuple(module(*self.inputs)), self.inputs)
        self.single = len(outputs) == 1
        self.outputs = outputs
        self._differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
        self.grad_outputs = [torch.zeros_like(outputs[index]) for index in self._differentiable]
        if self._differentiable:
            # On the host a capture runs for real: what it adds to the buffers is taken back.
            saved = [buffer.clone() for buffer in self._buffers] if accumulate and pool.device.type == "cpu" else []
            self.backward_graph, self.grad_inputs = pool.capture(self._backward, self.grad_outputs)
            if saved:
                torch._foreach_copy_(self._buffers, saved)
        # The captured autograd graph is spent; only the buffers are needed from here on.
        self.outputs = tuple(output.detach() for output in outputs)

    def __call__(self, *args):
        if self.module.training != self.training:
            mode = "train" if self.training else "eval"
            raise ValueError(f"captured in {mode} mode and called in the other: capture each mode, or call the module")
        if len(args) != len(self.inputs):
            raise ValueError(f"captured with {len(self.inputs)} arguments, called with {len(args)}")
        for index, (arg, static) in enumerate(zip(args, self.inputs, strict=True)):
            if arg.shape != static.shape or arg.dtype != static.dtype:
                raise ValueError(
                    f"argument {index} is {tuple(arg.shape)} {arg.dtype}, "
                    f"captured as {tuple(static.shape)} {static.dtype}"
                )
            if arg.requires_grad and not static.requires_grad:
                raise ValueError(f"argument {index} requires a gradient, the captured one did not")
        # Parameters are arguments, so that autograd calls backward even where no input requires a gradient.
        outputs = _Replay.apply(self, len(args), *args, *self.parameters)
        return outputs[0] if self.single else outputs

    def _warm_up(self, num_warmup):
        """Eager passes that leave no trace in gradients; buffers of the module (batch norm) do advance."""
        for _ in range(num_warmup):
            outputs = [output for output in _as_tuple(self.module(*self.inputs)) if output.requires_grad]
            if outputs:
                torch.autograd.grad(outputs, self._wanted(), [torch.zeros_like(o) for o in outputs], allow_unused=True)

    def _wanted(self):
        return [tensor for tensor in self.inputs if tensor.requires_grad] + self.parameters

    def _backward(self):
        outputs = [self.outputs[index] for index in self._differentiable]
        gradients = torch.autograd.grad(outputs, self._wanted(), self.grad_outputs, allow_unused=True)
        if not self.accumulate:
            return gradients
        num_inputs = len(gradients) - len(self.parameters)
        used = [(b, g) for b, g in zip(self._buffers, gradients[num_inputs:], strict=True) if g is not None]
        if used:
            torch._foreach_add_([b for b, _ in used], [g for _, g in used])
        return gradients[:num_inputs]

    def _check_buffers(self):
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if _accumulation_buffer(parameter).data_ptr() != address:
                raise ValueError(
                    f"the gradient buffer of a {tuple(parameter.shape)} parameter was replaced after the capture: "
                    "zero gradients in place (zero_grad(set_to_none=False))"
                )


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graphed, num_args, *tensors):
        for static, value in zip(graphed.inputs, tensors[:num_args], strict=True):
            if static.data_ptr() != value.data_ptr():
                static.detach().copy_(value)
        graphed.forward_graph.replay()
        graphed.num_calls += 1
        ctx.graphed, ctx.call = graphed, graphed.num_calls
        ctx.set_materialize_grads(True)
        outputs = tuple(output.clone() if graphed.copies else output.detach() for output in graphed.outputs)
        ctx.mark_non_differentiable(
            *(output for index, output in enumerate(outputs) if index not in graphed._differentiable)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        graphed = ctx.graphed
        if ctx.call != graphed.num_calls:
            raise CaptureError(
                f"backward of call {ctx.call} after call {graphed.num_calls}: the graph holds the activations of one "
                "call; run backward before the next call, or capture one GraphedModule per microbatch"
            )
        if graphed.accumulate:
            graphed._check_buffers()
        for static, index in zip(graphed.grad_outputs, graphed._differentiable, strict=True):
            grad = grads[index]
            if static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        graphed.backward_graph.replay()
        gradients = iter(
            gradient if gradient is None or not graphed.copies else gradient.clone() for gradient in graphed.grad_inputs
        )
        inputs = [next(gradients) if tensor.requires_grad else None for tensor in graphed.inputs]
        if graphed.accumulate:
            return None, None, *inputs, *(None for _ in graphed.parameters)
        # Never the static buffers themselves: autograd would install them as .grad.
        rest = [gradient.clone() if gradient is not None and not graphed.copies else gradient for gradient in gradients]
        return None, None, *inputs, *rest


def _as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def _accumulation_buffer(parameter):
    buffer = getattr(parameter, "main_grad", None)
    buffer = parameter.grad if buffer is None else buffer
    if buffer is None:
        raise ValueError(
            f"accumulate=True needs main_grad or grad of every parameter before the capture, one of shape "
            f"{tuple(parameter.shape)} has neither"
        )
    return buffer
