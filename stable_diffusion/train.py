"""Stable Diffusion v2: the whole training iteration in one CUDA graph.

The training loop without graphs, as `eager_step` and the loop at the end of this file run it:

    for step in range(num_steps):
        moments, context = next(batches)                         # VAE moments, text-encoder output, precomputed
        latents, noise, t = sample(moments), randn(), randint(1000)
        x = sqrt(a[t]) * latents + sqrt(1 - a[t]) * noise        # a: the noise schedule
        target = sqrt(a[t]) * noise - sqrt(1 - a[t]) * latents
        loss = mse(unet(x, t, context), target)
        grads = all_reduce(grad(loss * loss_scale, parameters))
        if all_finite(grads):                                    # decided on the GPU
            adamw(grads / loss_scale, learning_rate(step))
        loss_scale.update()                                      # on the GPU, too
        print(loss of an earlier step)                           # whose copy has arrived on the host

Captured: everything from `sample` to `loss_scale.update()`, the all-reduce too, in one graph, replayed once a step.
Each replay draws new random numbers, because torch registers its default generator with the graph. `graph_networks`
captures only the UNet's forward and backward, for comparison. In plain torch the capture of the whole step is

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):    # other threads may call CUDA meanwhile
        training_step(state)                                            # recorded, not run
    graph.replay()                                                      # once a step
    del graph                                                           # frees it and the memory of its pool

Not captured, and why:
    the batch's copy     each batch lies at another host address; a graph always reads the same addresses
    the learning rate    a schedule on the host computes it, and a graph would repeat its first value
    storing the report   loss, gradient norm and overflows: each step copies them to another address, and a graph always
                         writes to the same ones

Between the batch's copy and the report the host needs no value from the GPU, so the whole step fits one graph.

Copied in      `begin_step` copies the batch to the static inputs, buffers that never move, and the learning rate to a
               GPU number that AdamW reads.
Read in time   `end_step` copies the report on the same stream, before the next replay overwrites it. A later step reads
               the copy without waiting.
Freed          The session releases the graph and its pool, the memory that a graph keeps, after the loop.

    python -m stable_diffusion.train --preset tiny --variant graph_step
    python -m stable_diffusion.train --preset bench --variant graph_step --steps 20
    torchrun --standalone --nproc-per-node 2 -m stable_diffusion.train --variant graph_step    # data parallel
"""

from common.contract import Training, parse, variant
from stable_diffusion.config import FACTS, PRESETS, Config, card, flops_per_sample, require

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("stable_diffusion", Config, PRESETS, **FACTS)

import torch
import torch.nn.functional as F

from common.machine import host_state

# section: names a part of the step in a profile. mark: does nothing in timed steps and in captures. Where the host's
# launch time is measured, the host waits for the GPU at each mark, for its queue holds some 1,000 launches.
from common.measuring.marks import mark, section
from common.session import session
from common.training import flops
from stable_diffusion.data import shards
from stable_diffusion.state import State, hyperparameters

# ------------------------------------------------------------------------------------------------
# 1. The training that all variants share


def build(config: Config, device: torch.device, ranks) -> Training:
    on_gpu = device.type == "cuda"
    if config.data:
        shards.find(config.data)  # a mistake in --data ends the run before anything is built
    if not on_gpu:
        require(config, host_state.available_host_bytes())
    state = State(config, device, ranks.rank, ranks.world_size)
    return Training(
        state=state,
        results=state.report.read_losses,
        grad_norms=state.report.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,  # the seeded start, in place: graphs hold addresses
        evaluate=state.evaluate,
        close=state.close,
        items=config.batch,
        flops=config.batch * flops_per_sample(config),
        flops_convention=flops.FULL_ATTENTION,
        peak_flops=flops.peak_flops(torch.cuda.get_device_name(device) if on_gpu else "", config.precision),
        card=card(config, on_gpu),
        notes=[] if config.zero_init else ["last layers of residual branches start small, not at zero"],
        hyperparameters=hyperparameters(config, ranks.world_size) | state.hyperparameters,
    )


# ------------------------------------------------------------------------------------------------
# 2. The eager step


@variant("eager", kind="eager", parity="bitwise", headline=True, builds=("", "parameterized"))
def eager_step(state: State, index: int):
    """Kernels launched one by one, nothing waits for the GPU."""
    state.begin_step(index)  # copies the next batch into the static inputs, writes this step's learning rate
    training_step(state)
    state.end_step(index)  # starts the report's copy to the host; reads an earlier step's report that has arrived


def training_step(state: State):
    """From the batch in the static inputs to new weights: `graph_step` captures this. The host reads no result here."""
    with section("noise"):
        x, t, target = state.noisy_latents(state.inputs["moments"])
    with section("forward"):
        loss = F.mse_loss(state.model(x, t, state.inputs["context"]), target)
    mark()
    with section("backward"):
        # Not loss.backward(): without .grad nothing has to be zeroed. Captured gradients lie in the graph's pool.
        grads = torch.autograd.grad(loss * state.scaler.scale, state.parameters)
        grads = state.reduce(grads)  # on several ranks an all-reduce, the mean; on one rank nothing
    mark()
    with section("optimizer"):
        # Checks for overflows, updates weights by AdamW (common/training/optimizers/adam.py) unless a gradient
        # overflowed, then the loss scale; fills the report. All of it on the GPU.
        state.update(loss, grads)


# ------------------------------------------------------------------------------------------------
# 3. The whole step as one graph


@variant("graph_step", kind="graph", graphs=1, parity="bitwise", headline=True, formerly="graph")
class GraphedStep:
    """The full iteration as one graph: forward, loss, backward, scaling, optimizer.

    It needs no buffers beyond eager's static inputs.

    A replay reads the static inputs, the learning rate, weights, optimizer state and loss scale, and the random seed
    and offset, which torch writes before each replay. It writes weights, optimizer state, loss scale and report. All of
    these lie outside the graph's pool, which holds activations and gradients.

    Nothing can be captured on the default stream, so the harness runs the whole process, warm-up and eager steps too,
    on another one.
    """

    def __init__(self, state: State, capture):
        self.state, pool = state, capture.pool()
        # Libraries allocate memory and choose kernels at first use, which must not happen in a capture. Warm-up steps
        # train; `state.reset`, which a run calls before its first step, undoes that in place.
        capture.warm_up(eager_step)
        # A pool makes CUDA graphs that share memory. Without a GPU it makes host graphs, which record operators and run
        # them again. Each replay checks that the static tensors have kept address, shape, strides and dtype.
        static = tuple(state.inputs.buffers.values())  # moments and context
        with capture.capturing():
            self.graph, _ = pool.capture(lambda: training_step(state), static)

    def step(self, index: int):
        """`eager_step` with a replay in the place of `training_step`."""
        self.state.begin_step(index)
        with section("replay"):
            self.graph.replay()
        self.state.end_step(index)


# ------------------------------------------------------------------------------------------------
# 4. Only the UNet captured, a usual first attempt


@variant("graph_networks", kind="graph", graphs=2, parity="bitwise", headline=True, formerly="partial")
class GraphedNetworks:
    """UNet forward and backward as two graphs; loss, scaling and optimizer eager.

    It is here for comparison: `graph_step` shows that the rest could be captured, too. Each step copies into buffers of
    x, t and grad_v, the gradient of the UNet's output v. The forward leaves activations in the pool, and the backward
    reads them. The step reads v and the gradients before its end; the next replays overwrite them.
    """

    def __init__(self, state: State, capture):
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        x, t, _ = state.noisy_latents(state.inputs["moments"])
        self.x, self.t = torch.zeros_like(x), torch.zeros_like(t)
        self.grad_v = torch.zeros_like(x)
        with capture.capturing():
            context = state.inputs["context"]
            self.forward, v = pool.capture(lambda: state.model(self.x, self.t, context), (self.x, self.t, context))
            self.backward, self.grads = pool.capture(
                lambda: torch.autograd.grad(v, state.parameters, self.grad_v), (self.grad_v,)
            )
        self.v = v.detach()  # the same memory, which each replay writes, without the autograd graph of the capture

    def step(self, index: int):
        """`training_step` with two replays in the place of the UNet."""
        state = self.state
        state.begin_step(index)
        with section("noise"):
            x, t, target = state.noisy_latents(state.inputs["moments"])
            self.x.copy_(x)
            self.t.copy_(t)
        with section("forward"):
            self.forward.replay()
            v = self.v.requires_grad_()  # a leaf: the loss's autograd graph ends at the UNet's output
            loss = F.mse_loss(v, target)
        with section("backward"):
            self.grad_v.copy_(torch.autograd.grad(loss * state.scaler.scale, v)[0])
            self.backward.replay()
            grads = state.reduce(self.grads)  # read before the next replay overwrites them
        with section("optimizer"):
            state.update(loss, grads)
        state.end_step(index)


# other_variants.py has the rest: eager with torch's kernels, eager with .item() calls, the whole step captured inside
# Lightning's Trainer, three with torch.compile, and graphs of the UNet without a pool, launched on the eager step's
# memory (docs/parameterized.md).

# ------------------------------------------------------------------------------------------------
# 5. The loop. Under `make bench` the harness makes the steps, and the loop gets none.

if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
