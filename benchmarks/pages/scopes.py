"""Megatron's scopes of CUDA graphs beside this repository's variants, and all scopes of one model beside eager."""

from pathlib import Path
from typing import NamedTuple

from benchmarks import runs
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from benchmarks.runs import Found
from graph_worth.harness.files.facts import stem
from graph_worth.harness.judge import PASS


class Scope(NamedTuple):
    """A setting of Megatron: what it captures, and the variant here that captures the same part."""

    impl: str
    scope: str
    captured: str
    model: str
    variant: str


TE, CHUNK = "transformer_engine", "any, granularity chunk"
SCOPES = (
    Scope(TE, "attn", "norm, attention, residual", "moe", "graph_attn"),
    Scope(TE, "attn, moe_router", "also norm and router", "moe", "graph_attn_router"),
    Scope(TE, "attn, moe_router, moe_preprocess", "also the order of the rows", "moe", "graph_attn_router_preprocess"),
    Scope(TE, "whole layers", "dense layers", "gpt3", "graph_layer_te"),
    Scope(TE, "attn", "norm, attention, residual", "llama31", "graph_attn"),
    Scope(TE, "mlp", "norm, MLP, residual", "llama31", "graph_mlp"),
    Scope(TE, "whole layers", "dense layers", "llama31", "graph_layer"),
    Scope("local", "whole layers", "dense layers", "llama2_lora", "graph_layer"),
    Scope(CHUNK, "one microbatch", "a chunk of the model", "llama31", "graph_microbatch"),
    Scope("full_iteration", "all microbatches", "forward, backward", "llama31", "graph_fwd_bwd"),
    Scope("full_iteration, optimizer_cuda_graph", "the step", "also the optimizer", "llama31", "graph_step"),
    Scope("optimizer_cuda_graph", "the optimizer", "clipping, Adam", "llama31", "graph_optimizer"),
)


def markdown(results: Found, page: Path, argument: str = "") -> str:
    """The table; a cell for each workload that measured the variant. argument: a model, for its scopes alone."""
    if argument:
        return _of_model(results, page, argument)
    lines = []
    for scope in SCOPES:
        here = f"[{scope.model}](../{scope.model}/README.md) `{scope.variant}`"
        measured = "<br>".join(_measured(results, page, scope)) or "not measured"
        lines.append([scope.impl, scope.scope, scope.captured, here, measured])
    return tables.markdown(["Impl", "Scope", "In the graphs", "Here", "Measured"], lines)


def _of_model(results, page, model):
    """Rows of a model: gain, memory alone and issue of eager and of each scope; then the scopes without a run."""
    lines, missing = [], []
    for scope in (Scope("", "", "nothing", model, "eager"), *(setting for setting in SCOPES if setting.model == model)):
        rows = [row for row in _rows(results, model, scope.variant) if row.status == PASS]
        for row in rows:
            run = f"{tables.linked(row.workload.name, row, page)} ({in_markdown(headlines.short(row.workload.gpu))})"
            cells = [tables.CELLS[name](row) for name in ("alone GiB", "issue ms")]
            gain = tables.two(row.gain_range, "x") if row.gain_range else "base"
            lines.append([f"`{scope.variant}`", scope.captured, run, gain, *map(in_markdown, cells)])
        missing += [] if rows else [f"`{scope.variant}`"]
    names = ["Variant", "In the graphs", "Run", "gain", "alone GiB", "issue ms"]
    missing_text = f"\n\nNot measured in blocks on a GPU yet: {', '.join(missing)}." if missing else ""
    return tables.markdown(names, lines) + missing_text


def _rows(results, model, variant):
    """The rows of a variant on GPUs, of a quiet host and of the preset that is measured as it is."""
    for row in runs.on_gpus(results.rows):
        where = row.workload
        is_plain = not where.busy and not where.build and stem(where.preset) in ("bench", "qwen3_share")
        if (where.model, row.variant) == (model, variant) and is_plain:
            yield row


def _measured(results, page, scope):
    texts = []
    for row in _rows(results, scope.model, scope.variant):
        if row.gain_range:
            link = tables.linked(row.workload.name, row, page)
            texts.append(f"{link} {tables.two(row.gain_range, 'x')}, {_hosts(len(row.hosts), row.workload.gpu)}")
    if texts:
        return texts
    for where, hosts in results.archived.items():
        measured = [host for host in hosts if scope.variant in host.ms]
        if (where.model, where.preset, where.label, where.busy) == (scope.model, "bench", "", 0) and measured:
            gains = [host.ms["eager"] / host.ms[scope.variant] for host in measured if "eager" in host.ms]
            texts.append(f"{tables.two((min(gains), max(gains)), 'x')}, {_hosts(len(measured), where.gpu)}, archived")
    return texts


def _hosts(number: int, gpu: str) -> str:
    return f"{runs.NUMBER_WORDS.get(number, f'{number} hosts')} ({in_markdown(headlines.short(gpu))})"
