"""graph_worth/script/console.py: the head and the table of training by hand."""

from types import SimpleNamespace

import pytest

from graph_worth.script import console

TRAINING = SimpleNamespace(
    flops_notes=[],
    unit="tokens",
    flops=2e12,
    flops_convention="counted",
    peak_flops=4e15,
)
CPU = {"cpu": "a CPU, 2 cores", "torch": "2.11"}
GPU = CPU | {"gpu_name": "NVIDIA H200", "num_gpus": 8}
UNKNOWN = {
    "status": "failed", "message": "", "model": "fake", "preset": "tiny", "variant": "graph_step", "device": "cpu",
    "env": CPU, "steps": 0, "losses": [], "state_hashes": [], "said": [], "ms": None, "graphs": None, "strategy": None,
    "reserved_bytes": None, "capture_report": {},
}  # fmt: skip
TRAINED = UNKNOWN | {
    "status": "pass", "steps": 50, "ms": 2.0, "seconds": 0.1, "items_per_s": 12_345.6, "batch_classes": 1,
    "losses": [5.5, 4.0, 3.25], "strategy": "one graph", "graphs": 1, "replays": 50, "warmup_s": 1.5, "compile_s": 0.0,
    "capture_s": 0.25, "reserved_bytes": 3 << 30, "graph_pool_bytes": 1 << 29,
}  # fmt: skip
ADVICE = "Times of one run say little: make bench MODEL=fake measures what a graph is worth\n"


@pytest.fixture
def printed(capsys):
    def end(**changes):
        console.print_end(TRAINED | changes, TRAINING)
        return capsys.readouterr().out

    return end


def test_the_head_says_what_runs_where(capsys):
    console.print_head(UNKNOWN)
    assert capsys.readouterr().out == "fake/tiny  graph_step  CPU, a CPU, 2 cores  torch 2.11\n"
    console.print_head(UNKNOWN | {"device": "cuda", "env": GPU})
    assert capsys.readouterr().out.startswith("fake/tiny  graph_step  NVIDIA H200 x8  torch 2.11\n")


def test_the_table(printed):
    assert printed() == (
        "steps                    50  in 0.10 s\n"
        "step                2.00 ms  mean\n"
        "rate        12,346 tokens/s\n"
        "loss                5.50000  at first, 3.25000 at last\n"
        "graphs                    1  50 replays; one graph\n"
        "capture              0.25 s  warmup 1.50 s\n"
        "memory             3.00 GiB  0.50 GiB in pools of graphs\n" + ADVICE
    )


def test_a_project_without_our_makefile_is_told_the_command(printed, monkeypatch, tmp_path):
    monkeypatch.setattr(console, "ROOT", tmp_path)
    assert printed().endswith("graph-worth bench --model fake measures what a graph is worth\n")


def test_the_share_in_parameterized_regions_and_the_cost_of_new_addresses(printed):
    report = {"nodes": 90.0, "eager": 10.0, "coverage": 0.9, "regions": [{"region": "forward 0"}]}
    patching = {"patched_per_launch": 3.1416, "patch_us_per_node": 0.875}
    said = printed(capture_report=report | patching)
    assert (
        "coverage             90.0 %  of forward and backward: 90 nodes in regions, 10 beside them\n"
        "patching            0.88 us  of the host for a node with new addresses: 3.14 in a launch\n"
        "memory"
    ) in said
    assert "patching" not in printed(capture_report=report | dict.fromkeys(patching))


def test_on_a_gpu_it_has_the_share_of_the_named_peak(printed):
    assert "compute        1000 TFLOP/s  25.0 % of the named peak\n" in printed(device="cuda")
    assert "compute" not in printed()


def test_without_a_named_peak_it_says_how_the_rate_was_counted(printed, monkeypatch):
    monkeypatch.setattr(TRAINING, "peak_flops", None)
    monkeypatch.setattr(TRAINING, "flops_notes", ["FLOP not counted: mine::kernel"])
    assert "compute        1000 TFLOP/s  counted. FLOP not counted: mine::kernel\n" in printed(device="cuda")
    monkeypatch.setattr(TRAINING, "flops", 0.0)
    assert "compute" not in printed(device="cuda")


def test_a_slow_rate_is_not_zero(printed):
    assert "rate        0.0312 tokens/s\n" in printed(items_per_s=0.03124)
    assert "rate            99 tokens/s\n" in printed(items_per_s=99.0)


def test_what_is_not_there_has_no_row(printed):
    out = printed(graphs=0, strategy="none", capture_s=0.0, reserved_bytes=None)
    assert "graphs  " not in out and "memory" not in out
    out = printed(ms=None)
    assert not {"step", "rate"} & {line.split()[0] for line in out.splitlines()} and ADVICE not in out


def test_what_the_model_says(printed):
    out = printed(said=["saved in x", "all is well"])
    assert out.endswith(f"saved in x\nall is well\n{ADVICE}")


def test_what_failed_ends_with_its_reason_and_no_advice(printed, capsys):
    out = printed(status="failed", message="1 graphs made, 2 promised")
    assert out.endswith("failed: 1 graphs made, 2 promised\n") and "step  " in out and "make bench" not in out
    console.print_end(UNKNOWN | {"status": "unsupported", "message": "needs a GPU"}, TRAINING)
    assert capsys.readouterr().out == "unsupported: needs a GPU\n"
