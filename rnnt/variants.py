"""RNN-T's variants: one line on each, its promises and its constructor. Imports no torch.

The eager steps and the captures are in train.py, the others in other_variants.py.
"""

from common.variant_table import Declared, table

STEP, PADDED = "rnnt.train:eager_step", "rnnt.train:padded_step"

# No eager variant uses torch's kernels in place of ours, since it could only be slower: torch has no LAMB and no
# transducer loss, and a loss of torch operators takes hundreds of launches a step (rnnt/loss.py). A joint of torch
# operators takes more launches, too, and draws another dropout mask.
#
# Shapes decide which dropout numbers are drawn and how sums are rounded, so padded variants are compared with
# eager_padded. eager_sync and eager_padded train on the samples of eager.
VARIANTS = table(
    Declared(
        "eager",
        "kernels launched one by one, nothing waits for the GPU, batches without padding to buckets",
        kind="eager",
        make="common.variant:Eager",
        options={"step": STEP, "warm_up_step": PADDED},
        parity="bitwise",
        headline=True,
    ),
    Declared(
        "eager_sync",
        "eager with the usual host reads: loss, overflow, lengths for the loss",
        kind="eager",
        make="rnnt.other_variants:eager_sync",
        options={
            "load_batch": "rnnt.train:load_batch",
            "mean_loss": "rnnt.train:mean_loss",
            "warm_up_step": PADDED,
        },
        parity="bitwise",
        traits={"extra_work": "reads loss, overflow and lengths on the host"},
    ),
    Declared(
        "eager_padded",
        "eager with batches padded to the graphs' shapes: graph_networks and graph_step must equal it",
        kind="eager",
        make="common.variant:Eager",
        options={"step": PADDED},
        reference="eager_padded",
        parity="bitwise",
        traits={"extra_work": "computes the padding of the graphs' shapes"},
        headline=True,
    ),
    Declared(
        "graph_networks",
        "a forward and a backward graph per bucket of encoder and prediction network; the rest eager",
        kind="graph",
        make="rnnt.train:GraphedNetworks",
        graphs=None,  # known once the data has been seen
        replays=4,
        reference="eager_padded",
        parity="bitwise",
        headline=True,
        formerly="graph",
    ),
    Declared(
        "graph_step",
        "the whole step as one graph per pair of buckets, 16 at most",
        kind="graph",
        make="rnnt.train:GraphedStep",
        graphs=None,
        replays=1,
        reference="eager_padded",
        parity=1e-3,
        headline=True,
        formerly="full",
    ),
    Declared(
        "compile",
        "torch.compile of the three networks around their LSTMs, no graphs",
        kind="compile",
        make="rnnt.other_variants:CompiledNetworks",
        options={"train_on": "rnnt.train:train_on", "padded_step": PADDED},
        # Compiled code cannot call the joint's kernel and draws another dropout mask in its place.
        parity=0.1,
    ),
)
