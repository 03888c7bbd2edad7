"""Arguments of libraries that remove a finding in their code, so that nobody edits an installed package.

The keys are library, file and function. A version whose file or function has another name is passed over.
"""

from graph_worth.your_step.place import PACKAGES, Place

# Torch's argument and its default.
PRESERVES = "preserve_rng_state", True
CHECKPOINT = (
    "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False, 'preserve_rng_state': False})"
    " where it draws no random numbers, else leave it eager: graph_modules"
)
_SELF_LOOPS = "GCNConv(..., add_self_loops=False), GATConv alike; add the loops to the data before training"
_POOLING = "global_mean_pool(x, batch, size=4) with the number of graphs of a batch; other layers take dim_size"
_EMA = "call the average's step() after the step, outside of it: it counts on the host"
_NAN_FILTER = "TrainingArguments(logging_nan_inf_filter=False)"
ARGUMENTS = {
    ("transformers", "modeling_layers.py", "__call__"): CHECKPOINT,
    ("transformers", "modeling_layers.py", "forward_with_checkpointing"): CHECKPOINT,
    ("torch_geometric", "loop.py", "remove_self_loops"): _SELF_LOOPS,
    ("torch_geometric", "loop.py", "add_remaining_self_loops"): _SELF_LOOPS,
    ("torch_geometric", "_scatter.py", "scatter"): _POOLING,
    ("diffusers", "training_utils.py", "step"): _EMA,
    ("diffusers", "training_utils.py", "get_decay"): _EMA,
    ("torchmetrics", "stat_scores.py", "_update_state"): "metric.update() outside of training_step, on what it returns",
    ("transformers", "trainer.py", "_inner_training_loop"): _NAN_FILTER,
    ("transformers", "trainer.py", "_run_epoch"): _NAN_FILTER,
    ("lightning", "apply_func.py", "to_item"): "self.log(..., prog_bar=False); a logger reads every log_every_n_steps",
    ("torchrl", "continuous.py", "__init__"): "distribution_kwargs={'low': low, 'high': high}, tensors made in build",
}

# Of code that does otherwise while a stream captures, against which nothing stands.
NOTES = {
    ("transformers", "masking_utils.py", "fast_all"): "no attention_mask where nothing is padded: eager steps and a "
    "capture then take the same attention; else nothing to do",
}


def library_of(line: str) -> str:
    """Return the name of the installed package that FILE:LINE lies in, or ""."""
    parts = next((line.rpartition(folder)[2] for folder in PACKAGES if folder in line), "")
    return parts.partition("/")[0].partition(":")[0].removesuffix(".py")


def with_library(place: Place) -> str:
    """Return the user's line of a place, and beside it that of the library which makes the call."""
    library = library_of(place.line)
    return f"{place.own} (in {library}, at {place.line})" if library and place.line != place.own else place.own


def argument_for(place: Place, table=ARGUMENTS) -> str:
    """Return the argument of a library that removes a finding at this place, in words, or ""."""
    path = place.line.rpartition(":")[0]
    return table.get((library_of(place.line), path.rpartition("/")[2], place.function), "")
