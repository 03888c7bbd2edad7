"""Stable Diffusion v2: the whole training iteration in one CUDA graph.

The training loop without graphs, as `eager_step` and the loop at the end of this file run it:

    for step in range(num_steps):
        moments, context = next(batches)                         # VAE moments, text-encoder output, precomputed
        latents, noise, t = sample(moments), randn(), randint(1000)     # from here to target: noisy_latents
        x = sqrt(a[t]) * latents + sqrt(1 - a[t]) * noise        # a: the noise schedule
        target = sqrt(a[t]) * noise - sqrt(1 - a[t]) * latents
        loss = mse(unet(x, t, context), target)
        grads = all_reduce(grad(loss * loss_scale, parameters))
        if all_finite(grads):                                    # from here to loss_scale: state.update, on the GPU
            adamw(grads / loss_scale, learning_rate(step))
        loss_scale.update()
        check(report of an earlier step)                         # ends the run if too many steps in a row overflowed

The `if` is no branch: every step launches the same kernels. If a gradient is not finite, the norm of all gradients is
not finite either, and found_inf, a GPU number, becomes 1. Then AdamW's kernel stores nothing and the count of steps for
the bias correction, a GPU number too, does not grow. `loss_scale.update()` chooses by torch.where. Torch's own AdamW
does so with fused=True, capturable=True, a tensor as lr, and found_inf from GradScaler (docs/capture_it.md#amp).
On three archived H200 hosts graph_step gained 1.60 to 1.68x at batch 4, where the GPU waits for the host in eager, and
where eager was unsteady up to 2.79x (stable_diffusion/README.md).

Captured: `training_step`, from `noisy_latents` to `update`, in one graph. The host needs no value from the GPU in it.
Each replay draws new random numbers, because torch registers its default generator with the graph. The all-reduce is
captured, too: NCCL connects before (graph_worth/parallel/collectives.py), its buffers never move, and all ranks
replay in the same order. `graph_networks` captures only the UNet, for comparison. Lightning and torch.compile are in
other_variants.py. In plain torch:

    torch.cuda.set_stream(torch.cuda.Stream())   # before all else: captures cannot use the default stream
    for index in range(3): eager_step(state, index)         # warm-up: libraries allocate memory and choose kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        training_step(state)                     # recorded, not run. Other threads, as NCCL's, may call CUDA meanwhile
    state.reset()                                # undoes the warm-up in place: the graph holds addresses
    for index in range(num_steps):
        moments.copy_(staged["moments"])         # begin_step: the static inputs, which never move,
        context.copy_(staged["context"])
        lr.fill_(learning_rate(index))           # and a number on the GPU, which AdamW reads
        graph.replay()
        losses[index].copy_(report[0])           # end_step: the next replay overwrites the report, a tensor
    graph.reset()                                # gives its pool back to torch's allocator

Not captured, and why:
    the batch's copy     each batch lies at another host address; a graph always reads the same addresses. What is
                         staged on the GPU has two buffers in turn, so its copy has two addresses, too
    the learning rate    a schedule on the host computes it, and a graph would repeat the value at capture
    storing the report   loss, gradient norm and overflows: each step copies them to another address, and a graph always
                         writes to the same addresses

Copied in      `begin_step` copies the batch to the static inputs and the learning rate to the GPU. A second stream has
               copied the batch from pinned host memory to one of two staging buffers during the step before, and
               begin_step waits on the GPU for its event.
Read in time   `end_step` copies the report on the replay's stream, so before the next replay overwrites it: to lists on
               the GPU, and to the next of three pinned host buffers. It looks at the newest report that has arrived,
               and waits only for a buffer that it needs again, three steps later. On several ranks it waits for the
               report of two steps before, so that all ranks see the same.
Freed          after the loop `session` calls graph.reset(), which gives back the pool, the memory that a graph keeps.

    python -m stable_diffusion.train --preset tiny --variant graph_step
    torchrun --standalone --nproc-per-node 2 -m stable_diffusion.train --variant graph_step    # data parallel
"""

from graph_worth import Training, parse, variant
from stable_diffusion.config import FACTS, PRESETS, Config, card, flops_per_sample, require

if __name__ == "__main__":
    args = parse("stable_diffusion", Config, PRESETS, **FACTS)  # before torch is imported: --help is answered at once

import torch
import torch.nn.functional as F

from common import flops

# section names a part of the step in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, mark, section, session
from graph_worth.machine import host_state
from stable_diffusion.data import shards
from stable_diffusion.state import State

# ------------------------------------------------------------------------------------------------
# 1. The eager step


# @variant registers the step for command line and harness (docs/reading_a_script.md): skip it at first reading.
@variant("eager", kind="eager", parity="bitwise", headline=True)
def eager_step(state: State, index: int):
    """Kernels launched one by one, nothing waits for the GPU."""
    state.begin_step(index)  # copies the next batch into the static inputs, writes this step's learning rate
    training_step(state)
    state.end_step(index)  # starts the report's copy to the host; checks an earlier report that has arrived


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
        state.update(loss, grads)  # overflow check, AdamW, loss scale; fills the report, at a fixed address


# ------------------------------------------------------------------------------------------------
# 2. The whole step as one graph


@variant("graph_step", kind="graph", graphs=1, parity="bitwise", headline=True, formerly="graph")
class GraphedStep:
    """the full iteration as one graph: forward, loss, backward, scaling, optimizer.

    A replay reads the static inputs, the learning rate, weights, optimizer state and loss scale, and the random seed
    and offset, which torch writes before each replay. It writes weights, optimizer state, loss scale and report. All of
    these lie outside the graph's pool, which holds activations and gradients.
    """

    def __init__(self, state: State, capture: Capture):
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)  # three steps, as above; `session` calls state.reset before step 0
        # pool.capture(fn, static) is the `with torch.cuda.graph(...)` block above: it records fn's launches and returns
        # (graph, fn's result). Each replay checks that the tensors of `static` kept address, shape, strides and dtype.
        # The learning rate is not among them: state fills it in place. capturing() counts seconds and memory.
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
# 3. Only the UNet captured, a usual first attempt


@variant("graph_networks", kind="graph", graphs=2, parity="bitwise", headline=True, formerly="partial")
class GraphedNetworks:
    """UNet forward and backward as two graphs; noise, loss, all-reduce, scaling and optimizer eager.

    It is here for comparison: `graph_step` captures the rest, too. Each step copies into buffers of x, t and grad_v,
    the gradient of the UNet's output v. It reads v and the gradients before its end; the next replays overwrite them.
    In plain torch, after the stream and the warm-up as above:

        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool, stream=stream):
            v = unet(x, t, context)              # v's autograd graph keeps the activations' memory in the pool ...
        with torch.cuda.graph(backward, pool=pool, stream=stream):
            grads = torch.autograd.grad(v, parameters, grad_v)      # ... until this is captured, so it reuses none

    Replays have the order of the captures. Eager kernels between them allocate outside the pool, so no activation is
    overwritten before the backward has read it.
    """

    def __init__(self, state: State, capture: Capture):
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        x, t, _ = state.noisy_latents(state.inputs["moments"])  # for shapes only; state.reset seeds the draws again
        self.x, self.t = torch.zeros_like(x), torch.zeros_like(t)
        self.grad_v = torch.zeros_like(x)
        with capture.capturing():
            context = state.inputs["context"]
            self.forward, v = pool.capture(lambda: state.model(self.x, self.t, context), (self.x, self.t, context))
            self.backward, self.grads = pool.capture(
                lambda: torch.autograd.grad(v, state.parameters, self.grad_v), (self.grad_v,)
            )
        self.v = v.detach().requires_grad_()  # a leaf on the memory that each replay writes: eager autograd ends here

    def step(self, index: int):
        """`eager_step` with two replays in the place of the UNet's forward and backward."""
        state = self.state
        state.begin_step(index)
        with section("noise"):
            x, t, target = state.noisy_latents(state.inputs["moments"])
            self.x.copy_(x)
            self.t.copy_(t)
        with section("forward"):
            self.forward.replay()
            loss = F.mse_loss(self.v, target)
        with section("backward"):
            self.grad_v.copy_(torch.autograd.grad(loss * state.scaler.scale, self.v)[0])
            self.backward.replay()
            grads = state.reduce(self.grads)
        with section("optimizer"):
            state.update(loss, grads)  # the last to read the gradients, which the next replay overwrites
        state.end_step(index)


# ------------------------------------------------------------------------------------------------
# 4. Build and loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset,
# and after the loop releases the graphs and their pool. run.step is the variant's step.


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
        skip=state.inputs.skip,
        close=state.close,
        items=config.batch,
        flops=config.batch * flops_per_sample(config),
        flops_convention=flops.FULL_ATTENTION,
        peak_flops=flops.peak_flops(torch.cuda.get_device_name(device) if on_gpu else "", config.precision),
        card=card(config, on_gpu),
        notes=[] if config.zero_init else ["last layers of residual branches start small, not at zero"],
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
