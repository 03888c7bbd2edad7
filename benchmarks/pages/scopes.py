"""Megatron's scopes of CUDA graphs beside this repository's variants, and Megatron's own."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import WORKLOAD, Results
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness.files.facts import stem
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import cell, gib, hosts_text, span
from graph_worth.harness.standing import ASIDE


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


def markdown(results: Results, page: Path, _: str = "") -> str:
    """The table; a cell for each workload that measured the variant."""
    lines = []
    for scope in SCOPES:
        here = f"[{scope.model}](../{scope.model}/README.md) `{scope.variant}`"
        # docs/log.md lists the variants that no run has measured.
        if texts := _measured(results, page, scope):
            lines.append([scope.impl, scope.scope, scope.captured, here, "<br>".join(texts)])
    names = ["Impl", "Scope", "In the graphs", "Here", "Measured"]
    return tables.markdown(names, lines) if lines else "No run has measured them yet."


def _measured(results, page, scope):
    """Gains on quiet hosts with a GPU, with a preset that is measured as it is, or those of archived hosts."""
    rows, texts = results.rows, []
    is_quiet = (rows["gpu"] != "CPU") & (rows["busy_processes"] == 0) & (rows["build"] == "")
    is_plain = rows["preset"].map(stem).isin(["bench", "qwen3_share"]) & (rows["over"] == "")
    is_of_scope = (rows["model"] == scope.model) & (rows["variant"] == scope.variant)
    for row in results.records(is_quiet & is_plain & is_of_scope):
        gain = tables.gain_and_hosts(row, headlines.short(row.gpu))
        if gain:
            texts.append(f"{tables.linked(row.workload, row, page)} {in_markdown(gain)}")
    if texts:
        return texts
    archived = results.archive[(results.archive[["model", "preset"]] == [scope.model, "bench"]).all(axis=1)]
    archived = archived[(archived["label"] == "") & (archived["busy_processes"] == 0)]
    eager = archived[archived["variant"] == "eager"].set_index([*WORKLOAD, "host"])["ms"].rename("base_ms")
    archived = archived[archived["variant"] == scope.variant].join(eager, on=[*WORKLOAD, "host"])
    for _, hosts in archived.assign(gain=archived["base_ms"] / archived["ms"]).groupby(WORKLOAD, sort=False):
        gain = span(hosts["gain"].min(), hosts["gain"].max(), tables.TWO, "x")
        gpu = in_markdown(headlines.short(hosts["gpu"].iloc[0]))
        texts.append(f"{gain}, {hosts_text(len(hosts), len(hosts), word=gpu)}")
    return texts


def megatron(results: Results, page: Path, argument: str = "") -> str:
    """gpt3's newest run with Megatron-Core's build beside ours. argument: another model, or best: a sentence alone."""
    in_words = argument == "best"
    points = results.points[(results.points["gpu"] != "CPU") & (results.points["status"] == PASS)]
    points = points[points["model"] == ("gpt3" if in_words else argument or "gpt3")]
    points = points[points["run"].isin(points["run"][points["build"] == "megatron"]) & ~points["control"]]
    if not len(points):
        return "No run has measured it yet."
    points = points[points["run"] == points.sort_values("begin_utc")["run"].iloc[-1]]
    if in_words:
        named = []
        for build in ("", "megatron"):
            of_build = points[points["build"] == build].sort_values("ms")
            best, eager = of_build.iloc[0], of_build[of_build["variant"] == of_build["base"]].iloc[0]
            named.append(f"`{best['variant']}` takes {best['ms']:.1f} ms, its eager step {eager['ms']:.1f} ms")
        where = f"one {headlines.short(points['gpu'].iloc[0])}"
        where += ", while eager was unsteady" * (points["standing"] == ASIDE).any()
        return f"In one run on {where}, our {named[0]}. Megatron-Core's {named[1]}."
    lines = []
    for point in points.sort_values(["build", "ms"], ascending=[True, False]).to_dict("records"):
        gain = f"{cell(point['ratio'], '.3f', 'x')} ({cell(point['low'], '.3f')} to {cell(point['high'], '.3f')})"
        numbers = [cell(point[name], ".1f") for name in ("ms", "issue_ms", "busy_ms")]
        name = tables.linked_file(point["variant"], point["path"], page)
        lines.append([name, *numbers, gain if point["ratio"] > 0 else "", gib(point["alone_bytes"])])
    return tables.markdown(["variant", "step ms", "host ms", "GPU busy ms", "gain over its eager", "GiB alone"], lines)
