"""The output of training by hand: a card before it builds anything, a table when it has trained."""

from graph_worth.folders import CODE, ROOT
from graph_worth.machine import memory


def print_head(result: dict) -> None:
    """Say what runs where."""
    env = result["env"]
    where = f"{env['gpu_name']} x{env['num_gpus']}" if result["device"] == "cuda" else f"CPU, {env['cpu']}"
    print(f"{result['model']}/{result['preset']}  {result['variant']}  {where}  torch {env['torch']}", flush=True)


def print_end(result: dict, training) -> None:
    """Print the table and, last, what a person should know: why it failed, or which command measures.

    training: `graph_worth.contract.Training`, None where the build failed.
    """
    for name, value, note in _rows(result, training):
        print(f"{name:10s} {value:>16s}  {note}".rstrip())
    for line in result["said"]:
        print(line)
    if result["status"] != "pass":
        print(f"{result['status']}: {result['message']}")
    elif result["ms"]:
        # A project of somebody's own has no Makefile of ours.
        bench = "make bench MODEL=" if ROOT == CODE else "graph-worth bench --model "
        print(f"Times of one run say little: {bench}{result['model']} measures what a graph is worth")


def _rows(result, training):
    """(name, value, note) of what is known."""
    losses, hashes, ms = result["losses"], result["state_hashes"], result["ms"]
    if result["steps"]:
        yield "steps", str(result["steps"]), f"in {result['seconds']:.2f} s" if ms else ""
    if ms:
        num_classes = result["batch_classes"]
        yield "step", f"{ms:.2f} ms", "mean" if num_classes == 1 else f"mean over {num_classes} classes of batch"
        rate = result["items_per_s"]
        yield "rate", f"{rate:,.0f} {training.unit}/s" if rate >= 100 else f"{rate:.3g} {training.unit}/s", ""
    if ms and result["device"] == "cuda" and training.flops:
        tflops = training.flops / ms / 1e9
        peak = training.peak_flops
        counted = ". ".join([training.flops_convention, *training.flops_notes])
        how = f"{100e12 * tflops / peak:.1f} % of the named peak" if peak else counted
        yield "compute", f"{tflops:.3g} TFLOP/s" if tflops < 10 else f"{tflops:.0f} TFLOP/s", how
    if losses:
        yield "loss", f"{losses[0]:.5f}", f"at first, {losses[-1]:.5f} at last"
    if hashes:
        unmoved = result["unmoved"]
        still = f", {len(unmoved)} never moved, such as {unmoved[0]}" if unmoved else ""
        yield "state", hashes[-1], f"hash of {result['num_tensors']} tensors after the last step{still}"
    if result["graphs"]:
        yield "graphs", str(result["graphs"]), f"{result['replays']} replays; {result['strategy']}"
    if result["strategy"] is not None:
        rest = ", ".join(f"{name} {result[f'{name}_s']:.2f} s" for name in ("warmup", "compile") if result[f"{name}_s"])
        yield "capture", f"{result['capture_s']:.2f} s", rest
    yield from _regions(result["capture_report"])
    closing = result.get("closing", {})
    if "reruns" in closing:
        took = f", {closing['rerun_ms']:.2f} ms each" if closing["reruns"] else ""
        used = f"; the fullest buffer needed {100 * closing['used']:.0f} % of its rows" if "used" in closing else ""
        yield "reruns", str(closing["reruns"]), f"of {closing['steps']} steps{took}{used}"
    if result["reserved_bytes"]:
        pools = f"{memory.gib(result['graph_pool_bytes'])} in pools of graphs" if result["graphs"] else ""
        yield "memory", memory.gib(result["reserved_bytes"]), pools


def _regions(report):
    """The share in parameterized regions, and what patching costs."""
    if report.get("coverage") is not None:
        of_step = f"{report['nodes']:g} nodes in regions, {report['eager']:g} beside them"
        yield "coverage", f"{100 * report['coverage']:.1f} %", f"of forward and backward: {of_step}"
    if report.get("patch_us_per_node") is not None:
        nodes = f"of the host for a node with new addresses: {report['patched_per_launch']:.3g} in a launch"
        yield "patching", f"{report['patch_us_per_node']:.2f} us", nodes
