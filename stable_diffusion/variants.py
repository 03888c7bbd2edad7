"""Stable Diffusion's variants: what each is, what it promises, and where it is made (no torch here)."""

from common.variant_table import Declared, table

TRAIN, OTHER = "stable_diffusion.train:", "stable_diffusion.other_variants:"
STEP = {"eager_step": f"{TRAIN}eager_step"}
BITWISE = {"parity": "bitwise", "headline": True}
ONE_GRAPH = {"graphs": 1, "replays": 1}

# The preset as it is, in a worker of its own.
BUILDS: dict[str, dict] = {"parameterized": {}}
# torch's kernels and compiled ones round otherwise than ours.
ROUNDS = {"parity": 1e-3}
VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one, nothing waits for the GPU",
        kind="eager",
        make=f"{TRAIN}eager",
        builds=("", "parameterized"),
        **BITWISE,
    ),
    Declared(
        "eager_torch",
        "eager with torch's own group norm and GEGLU, as --kernels torch has them in all variants",
        kind="eager",
        make=f"{OTHER}EagerTorch",
        options=STEP,
        traits={"kernels": "torch's group norm and GEGLU"},
        headline=True,
        **ROUNDS,
    ),
    Declared(
        "eager_sync",
        "eager with the usual .item() calls: loss, overflow, loss scale",
        kind="eager",
        make="common.variant:Eager",
        options={"step": f"{OTHER}reading_step", "warm_up_step": STEP["eager_step"]},
        parity="bitwise",
        traits={"extra_work": "reads loss, overflow and loss scale on the host"},
    ),
    Declared(
        "graph_step",
        "the full iteration as one graph: forward, loss, backward, scaling, optimizer",
        kind="graph",
        make=f"{TRAIN}GraphedStep",
        formerly="graph",
        **ONE_GRAPH,
        **BITWISE,
    ),
    Declared(
        "graph_networks",
        "UNet forward and backward as two graphs; loss, scaling and optimizer eager",
        kind="graph",
        make=f"{TRAIN}GraphedNetworks",
        graphs=2,
        replays=2,
        formerly="partial",
        **BITWISE,
    ),
    Declared(
        "graph_step_lightning",
        "the full iteration as one graph, captured and replayed inside the loop of Lightning's Trainer",
        kind="graph",
        make=f"{OTHER}graph_step_lightning",
        formerly="lightning_graph",
        **ONE_GRAPH,
        **BITWISE,
    ),
    Declared("compile", "torch.compile of the UNet, no graphs", "compile", f"{OTHER}compiled", STEP, **ROUNDS),
    Declared(
        "graph_step_compile",
        "torch.compile of the UNet inside the full-iteration graph",
        kind="compile",
        make=f"{OTHER}compiled_graphed",
        options=STEP | {"graphed": f"{TRAIN}GraphedStep"},
        formerly="compile_graph",
        **ONE_GRAPH,
        **ROUNDS,
    ),
    Declared(
        "reduce_overhead",
        "torch.compile(mode='reduce-overhead') of the UNet: graphs as torch makes them",
        kind="compile",
        make=f"{OTHER}compiled",
        options=STEP | {"mode": "reduce-overhead"},
        graphs=None,
        replays=None,
        **ROUNDS,
    ),
    Declared(
        "graph_parameterized",
        "forward and backward of the UNet as graphs without a pool, launched on the memory of the eager step",
        kind="graph",
        make=f"{OTHER}parameterized",
        options=STEP,
        graphs=None,
        replays=None,
        parity="bitwise",
        builds=("parameterized",),
    ),
)
