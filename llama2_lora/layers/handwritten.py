"""Layers written by hand: forward and backward of a LoRA layer over static workspaces, without autograd.

The base weights are frozen and have no gradient. So a layer's backward needs its input x, q k v, attention's output,
the residual sum before the MLP and fc1's output, and nothing else. Only x is always kept. The rest is kept or computed
again in the backward, layer by layer as --keep says (llama2_lora/plan.py). Both ways give the same bits.

Layers are chained through buffers: a layer's output is its residual sum and its MLP's output. The norm at the start of
the next layer adds them, which gives its x. In the backward `grad` is the gradient of the residual stream, and
`operand`, or `grad_operand`, the same quantised for the GEMM that reads it first.
"""

import torch

from common.precision import nvfp4
from graph_worth import mark
from llama2_lora.config import Config
from llama2_lora.kernels.scaling import Formats, Scaling
from llama2_lora.kernels.torch_operators import dropout_key
from llama2_lora.layers.tensor import TensorRanks
from llama2_lora.plan import workspace
from llama2_lora.weights.adapters import Adapters
from llama2_lora.weights.frozen import FrozenWeights

QKV, PROJ = 0, 1


class HandwrittenStack:
    """All layers with embedding and head.

    A step: embed, forward(0), ..., compute_loss, backward(last), ..., backward(0), update_scales. They pass buffers on.
    inputs: name -> static tensor: tokens, targets, positions int64 [s], weights FP32 [s], the tokens' shares of the
    loss. keeps: names of what layer 0, 1, ... keeps. operators, attention: classes for this device, or functions that
    make them. loss: FP32, 0-d, this rank's part of the last step's loss. Gradients go to adapters.grads.

    With --tp config has this rank's widths (Config.shard), and `tensor` are the ranks that share the layers: where they
    have summands of a tensor, tensor.sum_ adds these up. Gradients of Adapters.replicated are summands, too, which
    State.reduce_gradients adds up.
    """

    def __init__(
        self, config: Config, formats: Formats, weights: FrozenWeights, adapters: Adapters, inputs, keeps, operators,
        attention, tensor: TensorRanks | None = None,
    ):  # fmt: skip
        self.config, self.formats, self.weights, self.adapters, self.inputs = config, formats, weights, adapters, inputs
        self.device, self.tensor = weights.device, tensor or TensorRanks()
        self.scaling = Scaling(config, self.device, self.tensor.group)
        self.operators = operators(config, formats, self.scaling, self.device)
        self.attention = attention(config, inputs)
        self.ratio = config.alpha / config.rank
        self.keeps = keeps
        types = {"fp32": torch.float32, "main": formats.main, "operand": formats.operand, "gradient": formats.gradient}
        self.work = {
            name: torch.zeros(shape, dtype=types[kind], device=self.device)
            for name, (shape, kind) in workspace(config).items()
        }
        # Views cost host time, so a step makes none: these are made once, as those of `_view` and `_heads`.
        self.x = self.work["x"].unbind()
        self.a = [layer.unbind() for layer in self.work["a"].unbind()]
        self.transposed = {name: self.work[name].t() for name in ("grad", "qkv_grad", "rank_grad")}
        self._views, self._parts = {}, {}
        self.kept = [self._kept(keeps) for keeps in self.keeps]
        self.holds_transposes = ["transpose" in kept for kept in keeps]
        self.transposes = [self._transposes(layer) for layer in range(config.layers)]
        # Attention's outputs from the forward to the backward.
        self.attended = [None] * config.layers
        self.loss = torch.zeros((), device=self.device)

    def _kept(self, keeps):
        """Buffers for the tensors that one layer keeps; attention itself allocates its output."""
        c, main = self.config, self.formats.main
        shapes = {"qkv": (c.qkv_width, main), "residual": (c.hidden, main), "fc1": (2 * c.ffn, self.formats.operand)}
        return {
            name: torch.zeros(c.tokens, width, dtype=dtype, device=self.device)
            for name, (width, dtype) in shapes.items()
            if name in keeps
        }

    def _transposes(self, layer):
        """name -> (W^T [inputs, outputs], its view W). A layer that holds the transposes makes them here, once; the
        others make each of them before its dgrad GEMM, in one place for all."""
        transposes = {}
        for name, (rows, columns) in self.config.matrices.items() if self.config.precision == "fp8" else ():
            value = self.weights.layers[layer][name].value
            if self.holds_transposes[layer]:
                transposed = value.new_empty(columns, rows)
                self.operators.transpose(value, transposed)
            else:
                transposed = self.work["transpose"][: rows * columns].view(columns, rows)
            transposes[name] = transposed, transposed.t()
        return transposes

    def _view(self, name, width):
        """The start of a flat workspace as [s, width]."""
        if (view := self._views.get((name, width))) is None:
            tokens = self.config.tokens
            view = self._views[name, width] = self.work[name][: tokens * width].view(tokens, width)
        return view

    def _heads(self, layer, qkv):
        """q, k and v of a layer, as attention takes them."""
        if (parts := self._parts.get(layer)) is None:
            parts = self._parts[layer] = self.attention.split(qkv)
        return parts

    # -- GEMMs of the frozen weights ---------------------------------------------------------------

    def _multiply(self, layer, name, operand, out):
        """out = operand W^T: a forward GEMM, of the input of the matrix `name`."""
        matrix, slot = self.weights.layers[layer][name], self.scaling.slot(layer, f"{name}_in")
        self.operators.gemm(self._in_fp4(operand), matrix.transposed, slot.inverse, matrix.inverse, out, fast=True)

    def _multiply_back(self, layer, name, operand, out):
        """out = operand W: a dgrad GEMM. In FP8 it reads W^T, which is held or made now."""
        matrix = self.weights.layers[layer][name]
        if self.config.precision != "fp8":
            torch.mm(self._in_fp4(operand), matrix.backward, out=out)
            return
        transposed, weight = self.transposes[layer][name]
        if not self.holds_transposes[layer]:
            self.operators.transpose(matrix.value, transposed)
        slot = self.scaling.slot(layer, f"{name}_grad")
        self.operators.gemm(operand, weight, slot.inverse, matrix.inverse, out, fast=False)

    def _in_fp4(self, operand):
        """An operand as a GEMM in NVFP4 reads it, where that is emulated."""
        if self.config.precision != "nvfp4_emulated":
            return operand
        mark()  # to round a tensor takes some hundred launches
        return nvfp4.emulate(operand)

    # -- parts that both directions compute ----------------------------------------------------------

    def _qkv(self, layer, qkv, recompute):
        """q k v, turned, of the normalised x in `operand`. The adapter's a is there already if `recompute`."""
        c, adapter, a = self.config, self.adapters.transposed[layer], self.a[layer][QKV]
        self._multiply(layer, "qkv", self._view("operand", c.hidden), qkv)
        if not recompute:
            self._into_rank(self._view("dropped", c.hidden), adapter["qkv.a"], a)
        qkv.addmm_(a, adapter["qkv.b"])
        self.operators.rope(qkv, self.inputs["positions"])

    def _proj(self, layer, recompute):
        """The projection of attention's output in `operand`, with its adapter."""
        c, adapter, a = self.config, self.adapters.transposed[layer], self.a[layer][PROJ]
        self._multiply(layer, "proj", self._view("operand", c.q_width), self.work["proj"])
        if not recompute:
            self._into_rank(self._view("dropped", c.q_width), adapter["proj.a"], a)
        self.work["proj"].addmm_(a, adapter["proj.b"])
        self.tensor.sum_(self.work["proj"])

    def _into_rank(self, x, matrix, out):
        """out [s, rank] = alpha / rank * x matrix."""
        torch.addmm(out, x, matrix, beta=0, alpha=self.ratio, out=out)

    def _mlp_norm(self, layer, **sources):
        """The norm before the MLP, as fc1's operand."""
        operand, slot = self._view("operand", self.config.hidden), self.scaling.slot(layer, "fc1_in")
        self.operators.norm(gain=self.weights.norms[layer][1], operand=operand, slot=slot, **sources)

    def _proj_key(self, layer):
        """The key of the projection's mask: tensor ranks have other columns of its input, and other masks."""
        return dropout_key(layer + self.tensor.rank * self.config.layers, PROJ)

    def _residual(self, layer):
        return self.kept[layer].get("residual", self.work["residual"])

    # -- a step ------------------------------------------------------------------------------------

    def embed(self):
        """Counts the step, whose number is in the masks of dropout, and looks up the embedding: layer 0's input."""
        self.operators.step.add_(1)
        return self._look_up()

    def _look_up(self):
        self.tensor.look_up(self.inputs["tokens"], self.weights.embedding, self.x[0])
        return self.x[0], None

    def forward(self, layer: int, residual, mlp):
        """Return the output as two summands, from those of the input (layer 0: x[0], None); keep what --keep says."""
        c, work, operators, kept = self.config, self.work, self.operators, self.kept[layer]
        x, gain = self.x[layer], self.weights.norms[layer][0]
        written = {
            "operand": self._view("operand", c.hidden),
            "slot": self.scaling.slot(layer, "qkv_in"),
            "dropped": self._view("dropped", c.hidden),
            "key": dropout_key(layer, QKV),
        }
        if mlp is None:
            operators.norm(residual, gain, **written)
        else:
            operators.norm(residual, gain, add=mlp, total=x, **written)
        qkv = kept.get("qkv", work["qkv"])
        self._qkv(layer, qkv, recompute=False)
        out, rest = self.attention.forward(*self._heads(layer, qkv))
        if "attention" in self.keeps[layer]:
            self.attended[layer] = out, rest
        written = {"operand": self._view("operand", c.q_width), "slot": self.scaling.slot(layer, "proj_in")}
        operators.quantize(out, **written, dropped=self._view("dropped", c.q_width), key=self._proj_key(layer))
        self._proj(layer, recompute=False)
        self._mlp_norm(layer, x=x, add=work["proj"], total=self._residual(layer))
        fc1, fc1_slot, stored = self._view("fc1", 2 * c.ffn), None, None
        if c.precision == "fp8":
            fc1_slot, stored = self.scaling.slot(layer, "fc1_out"), kept.get("fc1")
        else:
            fc1 = kept.get("fc1", fc1)
        self._multiply(layer, "fc1", self._view("operand", c.hidden), fc1)
        written = {"operand": work["fc2_in"], "slot": self.scaling.slot(layer, "fc2_in")}
        operators.swiglu(fc1, **written, stored_slot=fc1_slot, stored=stored)
        self._multiply(layer, "fc2", work["fc2_in"], work["fc2"])
        self.tensor.sum_(work["fc2"])
        return self._residual(layer), work["fc2"]

    def compute_loss(self, residual, mlp):
        """Final norm, logits and `loss` of the last layer's output. Returns its gradient, and that quantised."""
        c, work, last = self.config, self.work, self.config.layers - 1
        normed, grad = self._view("dropped", c.hidden), self._view("wide_grad", c.hidden)
        logits = self._view("fc1", c.vocab)
        gain = self.weights.final_norm
        self.operators.norm(residual, gain, add=mlp, total=work["final"], plain=normed)
        torch.mm(normed, self.weights.head.t(), out=logits)
        cross_entropy = (self.tensor if self.tensor.size > 1 else self.operators).cross_entropy
        cross_entropy(logits, self.inputs["targets"], self.inputs["weights"], work["losses"])
        torch.sum(work["losses"], 0, out=self.loss)
        torch.mm(logits, self.weights.head, out=grad)
        self.tensor.sum_(grad)
        slot = self.scaling.slot(last, "fc2_grad")
        self.operators.norm_backward(grad, work["final"], gain, work["grad"], operand=work["grad_operand"], slot=slot)
        return work["grad"], work["grad_operand"]

    def backward(self, layer: int, grad, operand):
        """From the gradient of the layer's output to that of its input, in place, and to its adapters' gradients."""
        work = self.work
        qkv, out, rest, residual, fc1 = self._again(layer)
        self._mlp_backward(layer, residual, fc1, grad, operand)
        self._proj_backward(layer, out, operand)
        parts = self._heads(layer, qkv)
        grads = self.attention.backward(self._view("wide_grad", self.config.q_width), *parts, out, rest)
        written = {"operand": work["qkv_grad_operand"], "slot": self.scaling.slot(layer, "qkv_grad")}
        self.operators.rope_backward(*grads, self.inputs["positions"], work["qkv_grad"], **written)
        self.attended[layer] = None
        del grads, out, rest
        self._qkv_backward(layer, grad, operand)
        return grad, operand

    def _again(self, layer):
        """The tensors that the backward reads: kept, or computed again in the order of the forward."""
        c, work, operators, kept = self.config, self.work, self.operators, self.kept[layer]
        x = self.x[layer]
        if (qkv := kept.get("qkv")) is None:
            qkv = work["qkv"]
            slot = self.scaling.slot(layer, "qkv_in")
            operators.norm(x, self.weights.norms[layer][0], operand=self._view("operand", c.hidden), slot=slot)
            self._qkv(layer, qkv, recompute=True)
        out, rest = self.attended[layer] or self.attention.forward(*self._heads(layer, qkv))
        if (residual := kept.get("residual")) is None:
            residual = work["residual"]
            slot = self.scaling.slot(layer, "proj_in")
            operators.quantize(out, operand=self._view("operand", c.q_width), slot=slot)
            self._proj(layer, recompute=True)
            self._mlp_norm(layer, x=x, add=work["proj"], total=residual)
        elif "fc1" not in kept:
            self._mlp_norm(layer, x=residual)
        if (fc1 := kept.get("fc1")) is None:
            fc1 = self._view("fc1", 2 * c.ffn)
            self._multiply(layer, "fc1", self._view("operand", c.hidden), fc1)
        return qkv, out, rest, residual, fc1

    def _mlp_backward(self, layer, residual, fc1, grad, operand):
        c, work = self.config, self.work
        self._multiply_back(layer, "fc2", operand, work["swiglu_grad"])
        stored = self.scaling.slot(layer, "fc1_out") if c.precision == "fp8" else None
        written = {"operand": work["fc1_grad"], "slot": self.scaling.slot(layer, "fc1_grad")}
        self.operators.swiglu_backward(fc1, work["swiglu_grad"], **written, stored_slot=stored)
        wide, slot = self._view("wide_grad", c.hidden), self.scaling.slot(layer, "proj_grad")
        self._multiply_back(layer, "fc1", work["fc1_grad"], wide)
        self.tensor.sum_(wide)
        gain = self.weights.norms[layer][1]  # adds the gradient of the norm's input to grad
        self.operators.norm_backward(wide, residual, gain, grad, residual=grad, operand=operand, slot=slot)

    def _proj_backward(self, layer, out, operand):
        """The gradient of attention's output to `wide_grad`, those of the projection's adapter to their place."""
        c, key = self.config, self._proj_key(layer)
        grad, dropped = self._view("wide_grad", c.q_width), self._view("dropped", c.q_width)
        self._multiply_back(layer, "proj", operand, grad)
        self.operators.quantize(out, dropped=dropped, key=key)
        through = self._view("dropped_grad", c.q_width)
        self._adapter_backward(layer, "proj", "grad", self.a[layer][PROJ], dropped, through)
        self.operators.add_dropout_gradient(grad, through, key=key)

    def _qkv_backward(self, layer, grad, operand):
        c, work, x, key = self.config, self.work, self.x[layer], dropout_key(layer, QKV)
        gain, dropped = self.weights.norms[layer][0], self._view("dropped", c.hidden)
        self.operators.norm(x, gain, dropped=dropped, key=key)
        # Below layer 0 is the frozen embedding: nothing needs the gradient of its output.
        through = self._view("dropped_grad", c.hidden) if layer else None
        self._adapter_backward(layer, "qkv", "qkv_grad", self.a[layer][QKV], dropped, through)
        if layer == 0:
            return
        wide = self._view("wide_grad", c.hidden)
        self._multiply_back(layer, "qkv", work["qkv_grad_operand"], wide)
        if self.tensor.size > 1:
            # The adapter's part of the gradient is a summand, too: both are added up in one collective.
            self.operators.add_dropout_gradient(wide, through, key=key)
            self.tensor.sum_(wide)
            through = None
        written = {"operand": operand, "slot": self.scaling.slot(layer - 1, "fc2_grad")}
        self.operators.norm_backward(wide, x, gain, grad, residual=grad, **written, through_dropout=through, key=key)

    def _adapter_backward(self, layer, name, grad, a, dropped, through):
        """Gradients of both matrices, and of the dropped-out input to `through` unless that is None.

        grad: the workspace with the gradient of the output.
        """
        adapter, grads = self.adapters.layers[layer], self.adapters.layer_grads[layer]
        rank_grad = self.work["rank_grad"]
        self._into_rank(self.work[grad], adapter[f"{name}.b"], rank_grad)
        torch.mm(self.transposed[grad], a, out=grads[f"{name}.b"])
        torch.mm(self.transposed["rank_grad"], dropped, out=grads[f"{name}.a"])
        if through is not None:
            torch.mm(rank_grad, adapter[f"{name}.a"], out=through)

    def update_scales(self) -> None:
        """After the backward: the scales of the next step."""
        self.scaling.update()

    def reset(self, first_step: int = 0) -> None:
        """first_step: start of the count that selects the masks of dropout; each rank has its own."""
        self.scaling.reset()
        self.operators.step.fill_(first_step)

    def named_state(self):
        yield from self.scaling.named_state()
