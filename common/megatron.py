"""A GPT slice of Megatron-Core, trained by its schedule, DDP and optimizer, and the three captures that it ships.

Read in version 0.19.2. Megatron makes its captures ready when a model is built, from `cuda_graph_impl`. Here they share
one model, which is built without them: each variant sets the option and the layers' attributes between `enter` and
`leave` alone, so that the weights, gradients and kernels of all variants are the same.
"""

import functools
import importlib.metadata
import sys
import tempfile
import types
from collections.abc import Callable

import torch

from common.history import History
from common.precision import transformer_engine
from graph_worth import StaticInputs, Unsupported, mark, section, variant

VERSION = "0.19.2"
APEX = "fused_weight_gradient_mlp_cuda"
INSTALL = f'pip install --no-deps "megatron-core=={VERSION}"'


def fault_of(precision: str) -> str | None:
    """Return the reason why Megatron-Core cannot run here, with the line that installs it, or None."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if sys.version_info < (3, 12):
        return f"megatron-core {VERSION} needs Python 3.12, this is {sys.version.split()[0]}"
    if installed != VERSION:
        return f"megatron-core {VERSION} is needed, {installed} is installed: {INSTALL}"
    if not torch.cuda.is_available():
        return "Megatron-Core's layers need a GPU"
    return transformer_engine.te_fault(fp8=precision == "fp8")


def _accumulate(x, grad, total):
    torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)


def start(device: torch.device, microbatches: int) -> None:
    """Make Megatron's process groups of one rank, its random states and its count of microbatches, once a process.

    The fused weight gradient of the head comes from apex in Megatron's images. Where apex is missing, cuBLAS does the
    same in one GEMM, as in our models. Transformer Engine's layers accumulate themselves.
    """
    try:
        importlib.import_module(APEX)
    except ImportError:
        gemms = {"wgrad_gemm_accum_fp32": _accumulate, "wgrad_gemm_accum_fp16": _accumulate}
        sys.modules[APEX] = types.SimpleNamespace(**gemms)  # type: ignore[assignment]
    from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        backend, store = "nccl" if device.type == "cuda" else "gloo", f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group(backend, init_method=store, world_size=1, rank=0)
        torch.distributed.barrier()  # Communicators are made now, not in a capture.
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, microbatches, 1, 1, False)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1234, te_rng_tracker=True)


def transformer_options(config, **more) -> dict:
    """Return the fields of Megatron's TransformerConfig that all slices have, and `more`."""
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "kv_channels": config.head_dim,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "perform_initialization": False,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": True,
        "fp8": "hybrid" if config.precision == "fp8" else None,
        **more,
    }


class MegatronState(History):
    """GPTModel of Transformer Engine's layers in DDP, Megatron's Adam, and our batches.

    batches: tokens and targets of a step, [m, s, b]. settings: "options" of TransformerConfig, "model" of GPTModel,
    "ddp" of DistributedDataParallelConfig, and "adam", the model's numbers. initialise(name, parameter, master): sets a
    parameter of Megatron's and its FP32 master in place.
    """

    def __init__(self, config, device: torch.device, batches: list, settings: dict, initialise):
        self.inputs = StaticInputs({name: rows.to(device, copy=True) for name, rows in batches[0].items()})
        names = ("num_microbatches", "seq_length", "micro_batch_size")
        self.sizes = dict(zip(names, self.inputs["tokens"].shape, strict=True))
        start(device, self.sizes["num_microbatches"])
        transformer_engine.transformer_engine()
        from megatron.core import distributed, full_cuda_graph, optimizer, pipeline_parallel
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.core.transformer.cuda_graphs import annotate_first_last_layer
        from megatron.core.transformer.module import Float16Module

        # Captures and the nodes that accumulate gradients then share the stream of all variants.
        full_cuda_graph._shared_capture_stream = torch.cuda.current_stream()
        self.config, self.device, self.batches = config, device, batches
        self._options, self._initialise = settings["options"], initialise
        self.megatron = megatron = self.configured("none")
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        module = GPTModel(
            megatron, spec, max_sequence_length=self.sizes["seq_length"], parallel_output=True, **settings["model"]
        ).to(device)
        annotate_first_last_layer(module.decoder.layers)
        self.model, self.layers = module, module.decoder.layers
        ddp = distributed.DistributedDataParallelConfig(check_for_nan_in_grad=False, **settings["ddp"])
        self.ddp = distributed.DistributedDataParallel(megatron, ddp, Float16Module(megatron, module))
        adam = settings["adam"]
        numbers = {"lr": config.lr, "adam_eps": adam["eps"], "clip_grad": adam["clip"]}
        numbers |= {"adam_beta1": adam["betas"][0], "adam_beta2": adam["betas"][1]}
        numbers |= {"weight_decay": adam["weight_decay"], "params_dtype": torch.bfloat16}
        numbers = optimizer.OptimizerConfig(bf16=True, **numbers)
        self.optimizer = optimizer.get_megatron_optimizer(numbers, [self.ddp], use_gloo_process_groups=False)
        (chained,) = self.optimizer.chained_optimizers
        self.adam = chained.optimizer
        chained.init_state_fn(self.adam)
        self.schedule = pipeline_parallel.get_forward_backward_func()
        self.fp8 = transformer_engine.TransformerEngineScaling(self.layers)  # of delayed scaling, where it has any
        super().__init__(device)
        positions = torch.arange(self.sizes["seq_length"], device=device).expand(self.sizes["micro_batch_size"], -1)
        self._microbatches = [
            {"tokens": tokens.t(), "targets": targets.t(), "positions": positions}
            for tokens, targets in zip(self.inputs["tokens"], self.inputs["targets"], strict=True)
        ]
        self.reset()

    def configured(self, impl: str):
        """Return Megatron's configuration with its option `cuda_graph_impl`; Unsupported in its words where refused."""
        from megatron.core.transformer import TransformerConfig

        try:
            return TransformerConfig(cuda_graph_impl=impl, **self._options)
        except (AssertionError, ValueError) as error:
            raise Unsupported(f"Megatron-Core refuses: {' '.join(str(error).split())}") from error

    def forward_backward(self, schedule=None) -> torch.Tensor:
        """Run Megatron's schedule over the step's microbatches and return the mean loss."""
        self.ddp.zero_grad_buffer()
        results = (schedule or self.schedule)(
            forward_step_func=forward_step,
            data_iterator=iter(self._microbatches),
            model=[self.ddp],
            forward_only=False,
            **self.sizes,
        )
        return torch.stack([result["loss"] for result in results]).mean()

    def step(self, index: int, schedule=None) -> None:
        """Train on batch `index`."""
        with section("data"):
            self.inputs.load(self.batches[index % len(self.batches)])
        with section("forward and backward"):
            loss = self.forward_backward(schedule)
        mark()
        with section("optimizer"):
            _, norm, _ = self.optimizer.step()
        slot = self.slot(index)
        self.losses[slot].copy_(loss)
        self.grad_norms[slot].copy_(torch.as_tensor(norm).squeeze())

    @torch.no_grad()
    def reset(self) -> None:
        """Set all that a step reads or writes back to the seeded start, in place."""
        for name, parameter in self.model.named_parameters():
            self._initialise(name, parameter, parameter.main_param)
        self.ddp.zero_grad_buffer()
        for group in self.adam.param_groups:
            group.pop("step", None)
        for moments in self.adam.state.values():
            torch._foreach_zero_(list(moments.values()))
        self.fp8.reset()
        self.losses.zero_()
        self.grad_norms.zero_()

    def named_state(self):
        """Yield (name, tensor) of parameters, of the optimizer's masters and moments, and of the FP8 scales."""
        yield from self.model.named_parameters()
        for index, (master, moments) in enumerate(self.adam.state.items()):
            for name, tensor in ({"master": master} | moments).items():
                yield f"optimizer.{index}.{name}", tensor
        yield from self.fp8.named_state()


def forward_step(data_iterator, model):
    """Return the logits of the next microbatch and the function that makes its loss, as Megatron's schedules ask."""
    batch = next(data_iterator)

    def mean_loss(logits):
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())
        return loss, {"loss": loss.detach().clone()}

    return model(batch["tokens"], batch["positions"], None), mean_loss


@variant("megatron_eager", kind="eager", parity="bitwise", builds=("megatron",), when=lambda c: c.layer == "megatron")
def eager_step(state: MegatronState, index: int):
    """Megatron-Core's eager step: cuda_graph_impl none."""
    state.step(index)


class MegatronCapture:
    """A capture of one `cuda_graph_impl`: `_make` captures, `_put_in` and `_take_out` change the layers."""

    impl = ""
    _make: Callable
    close: Callable

    def __init__(self, state: MegatronState, capture):
        from megatron.core.transformer import cuda_graphs

        self.state, self.schedule, self.graphs = state, state.schedule, cuda_graphs
        self.flag = None
        fields = vars(state.configured(self.impl))
        self._fields = {name: value for name, value in fields.items() if "cuda_graph" in name}
        self._plain = {name: getattr(state.megatron, name) for name in self._fields}
        capture.strategy = f"Megatron-Core, cuda_graph_impl={self.impl}"
        capture.warm_up(MegatronState.step)
        self.enter()
        try:
            with capture.capturing(), capture.pool().adopt(), transformer_engine.undone_where_it_fails(state.layers):
                self._make()
            self.flag = transformer_engine.exchange_flag(None)
        except BaseException:
            cuda_graphs._set_capture_end()
            self.close()
            raise
        finally:
            self.leave()

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        self.state.step(index, self.schedule)

    def enter(self) -> None:
        """Put Megatron's option in, and the flag on the device by which captured layers cast FP8 weights."""
        vars(self.state.megatron).update(self._fields)
        transformer_engine.exchange_flag(self.flag)
        self._put_in()

    def leave(self) -> None:
        """Take both out: eager layers and other captures have their own."""
        self._take_out()
        vars(self.state.megatron).update(self._plain)
        transformer_engine.exchange_flag(None)

    def _put_in(self):
        """Nothing, unless a subclass's layers change."""

    _take_out = _put_in


@variant(
    "megatron_local",
    kind="graph",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity=1e-2,  # with delayed scaling
    reference="megatron_eager",
    builds=("megatron",),
    traits={"kernels": "with delayed scaling the FP8 history of gradients ages with each layer and microbatch"},
    when=lambda c: c.layer == "megatron",
)
class Local(MegatronCapture):
    """Megatron-Core's CudaGraphManager: a forward and a backward graph for each layer, which the microbatches share."""

    impl = "local"
    managers: tuple = ()

    def _make(self):
        # Or the first manager leaves the stream of all variants.
        self.graphs.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        for layer in self.state.layers:
            layer.create_mcore_cudagraph_manager(self.state.megatron)
        self.managers = tuple(layer.cudagraph_manager for layer in self.state.layers)
        self._put_in()
        if rotary := getattr(self.state.model, "rotary_pos_emb", None):
            # Megatron keeps the angles, and with them counts of how often graphs read them, also those of before.
            angles = rotary(self.state.sizes["seq_length"], packed_seq=False, cp_group=None)
            for tensor in self.graphs._get_tensor_alias_chain(angles):
                vars(tensor).pop("cg_buffer_metadata", None)
        # The schedule's first pass is eager and records the order of layers. At its end it captures, and makes the
        # default stream the current one, on which nothing can be captured.
        with torch.cuda.stream(torch.cuda.current_stream()):
            self.state.forward_backward()

    def _put_in(self):
        for layer, manager in zip(self.state.layers, self.managers, strict=False):
            layer.cudagraph_manager = manager
        # Megatron's list of modules to which it tells the first microbatch is made once and for all. A manager that is
        # not in it would never let its layer cast the weights to FP8 again.
        vars(self.state.ddp).pop("modules_with_is_first_microbatch", None)

    def _take_out(self):
        for layer in self.state.layers:
            layer._modules.pop("cudagraph_manager", None)
        vars(self.state.ddp).pop("modules_with_is_first_microbatch", None)

    def close(self) -> None:
        """Let Megatron forget its graphs."""
        self.managers = ()
        self.graphs.delete_cuda_graphs()


@variant(
    "megatron_te",
    kind="graph",
    graphs=lambda c: 2 * c.layers,
    replays=lambda c: c.layer_passes,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class TransformerEngineHelper(MegatronCapture):
    """Megatron-Core's TECudaGraphHelper: Transformer Engine's graphs of each layer, no clones of gradients."""

    impl = "transformer_engine"
    _of_layers: tuple = ()
    _accumulated: tuple = ()

    def _make(self):
        from transformer_engine.pytorch.graph import make_graphed_callables

        state, sizes = self.state, self.state.sizes
        without_clones = functools.partial(make_graphed_callables, clone_param_grads_on_return=False)
        self.graphs.make_graphed_callables = without_clones
        shape = sizes["seq_length"], sizes["micro_batch_size"]
        helper = self.graphs.TECudaGraphHelper([state.ddp], state.megatron, *shape, [])
        helper.create_cudagraphs()
        self._of_layers = tuple(layer.cuda_graphs for layer in state.layers)
        # Their gradients are in main_grad already, which a replay does not say, and what it returns must not be added.
        self._accumulated = tuple(w for w in state.model.parameters() if w.grad_added_to_main_grad)

    def _put_in(self):
        self.state.model.decoder.cuda_graphs = []
        for weight in self._accumulated:
            weight.grad_added_to_main_grad = True
        for index, layer in enumerate(self.state.layers):
            layer.cuda_graphs = self._of_layers[index] if self._of_layers else []
            layer.cuda_graph_manual_hooks = []

    def close(self) -> None:
        """Let the graphs give back their memory."""
        for graphs in self._of_layers:
            for graph in graphs:
                graph.reset()


@variant(
    "megatron_full",
    kind="graph",
    graphs=1,
    parity="bitwise",
    reference="megatron_eager",
    builds=("megatron",),
    when=lambda c: c.layer == "megatron",
)
class FullIteration(MegatronCapture):
    """Megatron-Core's FullCudaGraphWrapper: forward and backward of all microbatches, the optimizer eager."""

    impl = "full_iteration"

    def _make(self):
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        self.schedule = FullCudaGraphWrapper(self.state.schedule, cuda_graph_warmup_steps=0)
        self.state.forward_backward(self.schedule)

    def close(self) -> None:
        """Let Megatron's classes forget graph and inputs."""
        self.schedule.reset_cuda_graph("training")
        self.schedule.static_loader.static_buffers["training"].clear()
