"""make measure: the verdict on a run, and a step from its file to a verdict on the CPU."""

import errno
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import command, judge, measure, report
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.pages import run_table
from graph_worth.harness.processes.gpus import Gpus
from graph_worth.your_step import step_file
from tests.helpers.bench_process import wait_for
from tests.helpers.made_run import made_run, with_apart
from tests.helpers.processes import program

PARTS = ["graph_step", "graph_fwd_bwd", "graph_modules"]
WHOLE = ["graph_step", "compile", "graph_step_compiled", "reduce_overhead"]
STEP = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(16, 64) for _ in range(3)]
    count = [0.0]
    def step(batch):
        optimizer.zero_grad()
        count[0] += 1
        loss = (model(batch.to(device)) - batch.to(device)).square().mean() * SCALE
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""


@pytest.fixture
def step(tmp_path):
    """The path of a file that holds STEP."""
    path = tmp_path / "my_step.py"
    path.write_text(STEP)
    return str(path)


@pytest.mark.parametrize(
    ("ms", "status", "word"),
    [
        (8.0, measure.FASTER, "Faster"),
        (10.0, measure.SAME, "Same"),
        (12.5, measure.SLOWER, "Slower"),
        ([8.0, 12.0] * 4, measure.UNCLEAR, "Unclear"),
    ],
)
def test_the_verdict_follows_the_interval(ms, status, word):
    found, sentence = measure.verdict(made_run(ms={"graph_layer": ms}))
    assert found == status and sentence.startswith(word)


@pytest.mark.parametrize(
    ("given", "reason", "status"),
    [
        ("differs", "parity: differs by", measure.WRONG),
        ("numerics_failed", "loss is not finite", measure.WRONG),
        ("capture_failed", "Tensor.item at my_step.py:9 cannot be captured", measure.NO_CAPTURE),
        ("oom", "needs 9 GiB more", measure.NO_CAPTURE),
        ("unsupported", "several ranks are captured on GPUs alone", measure.NOT_MEASURED),
        ("fence", "Not measured: graph_layer: a step takes 8.00 ms, its kernels keep", measure.NOT_MEASURED),
    ],
)
def test_a_verdict_without_a_graph_that_passes_says_why(given, reason, status):
    run = made_run(ms={"graph_layer": 8.0})
    own = run.builds[""].variants["graph_layer"]
    if given == "differs":
        own.parity[0].hashes, own.parity[0].losses = ["other"], [2.0]
    elif given == "fence":
        own.profile.busy_ms = 9.0
    else:
        own.raised, own.blocks = Raised(kind=given, reason=reason), []
    found, sentence = measure.verdict(run)
    assert found == status and reason in sentence


def test_the_verdict_is_of_the_best_variant_of_all_processes():
    """Each is divided by the eager of its own process."""
    run = made_run(ms={"graph_layer": 8.0})
    with_apart(run, "reduce_overhead", names=("eager", "graph_swift"), ms={"eager": 12.0, "graph_swift": 6.0})
    status, sentence = measure.verdict(run)
    assert status == measure.FASTER and "(graph_swift): 2.000x" in sentence
    variants = measure._as_json(run, Path("run.json"), sentence)["variants"]
    assert {name: facts["ratio"] for name, facts in variants.items()} == pytest.approx(
        {"graph_layer": 1.25, "graph_swift": 2.0}
    )
    # The whole run is wrong where one process is.
    run.builds["+reduce_overhead"].variants["graph_swift"].blocks[0].losses = [1.0, 0.6]
    assert "Wrong numbers: graph_swift." in measure.verdict(run)[1]
    text = run_table.report(run)
    assert "\nreduce_overhead, in a process of its own with eager:\n" in text
    assert text.count("Each ratio compares with the eager of its own table") == 1


def test_where_eager_fails_too_no_graph_is_blamed():
    run = made_run(ms={"graph_layer": 8.0})
    for name in ("eager", "graph_layer"):
        for block in run.builds[""].variants[name].blocks:
            block.moved = [0.0] * len(block.moved)
    found, sentence = measure.verdict(run)
    assert found == measure.EAGER_FAILED and sentence.startswith("The eager step failed: ")


def test_on_a_cpu_nothing_is_measured():
    found, sentence = measure.verdict(made_run(preset="tiny", gpus=(), device="cpu", ms={"graph_layer": 5.0}))
    assert found == measure.NOT_MEASURED and "there is no GPU" in sentence and "graph_layer" in sentence


@pytest.mark.parametrize(("ms", "words"), [(15.0, "may gain up to 1.50x"), (10.05, "has little to remove")])
def test_the_quick_answer_names_step_busy_and_what_a_graph_can_gain(ms, words):
    run = made_run(issue=(9.0, 10.0), ms={"eager": ms})
    del run.builds[""].variants["graph_layer"]
    found, sentence = measure.verdict(run)
    assert found == measure.NOT_MEASURED and words in sentence and f"a step takes {ms:.2f} ms" in sentence


def test_a_rate_says_what_was_counted_and_what_was_not():
    run = made_run(ms={"graph_layer": 8.0}, model=OWN_STEP)
    build = run.builds[""]
    build.flops_per_step, build.flops_convention = 4e12, "counted by torch"
    build.flops_notes, build.notes = ["FLOP not counted: mine::kernel"], ["another note"]
    text = "4 TFLOP a step of each rank, eager 400 TFLOP/s, graph_layer 500 TFLOP/s (counted by torch). "
    assert run_table.rates(judge.judged(run)[""]) == f"{text}FLOP not counted: mine::kernel"
    assert text in run_table.report(run).replace("\n", " ") and text in report.page_of(run)


def measured(tmp_path, scale, *more):
    path = tmp_path / "my_step.py"
    path.write_text(STEP.replace("SCALE", scale))
    words = [sys.executable, "-m", "benchmarks.measure", "--step", f"{path}:build", "--out", str(tmp_path / "runs")]
    return subprocess.run([*words, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_sound_step_goes_from_its_file_to_a_run_file_and_a_verdict(tmp_path):
    done = measured(tmp_path, "1.0")
    assert done.returncode == measure.NOT_MEASURED, done.stdout + done.stderr
    assert "graph_step, graph_fwd_bwd" in done.stdout.splitlines()[-1]
    (path,) = (tmp_path / "runs").rglob("*.json")
    run = run_file.read(path)
    assert {"operator", "linear"} <= run.host.calls.keys()
    (own,) = judge.judged(run).values()
    build = own.build
    assert {own.verdicts[name].parity for name in ("graph_step", "graph_fwd_bwd")} == {"bitwise"}
    # Three products of each layer but one: the first one's input needs no gradient.
    assert build.flops_per_step == 2 * 16 * 64 * 64 * 5


@pytest.mark.parametrize(
    ("names", "whole", "mine", "timed"),
    [
        (("NVIDIA H100",), True, False, WHOLE),
        (("NVIDIA H100",), True, True, [*WHOLE, "mine"]),
        (("NVIDIA H100",), False, False, [*measure.USUAL]),
        (("NVIDIA H100",), False, True, [*measure.USUAL, "mine"]),
        ((), True, False, PARTS),
        ((), True, True, [*PARTS, "mine"]),
    ],
)
def test_a_gpu_times_no_parts_of_a_step_that_can_be_captured_whole(step, monkeypatch, names, whole, mine, timed):
    class Asked(Exception):
        pass

    def ask(asked):
        raise Asked(asked.variants)

    monkeypatch.setattr(measure, "doctor", lambda asked: (0, "said", {"whole_is_right": whole, "has_mine": mine}))
    monkeypatch.setattr(measure.gpus, "find_gpus", lambda: Gpus(names))
    monkeypatch.setattr(measure.run, "measured", ask)
    with pytest.raises(Asked) as asked:
        measure.measure(measure.parse(["--step", f"{step}:build"]))
    found = asked.value.args[0]
    assert (command.words_of(found) if found else None) == timed


def test_row_and_sentence_say_when_a_capture_is_paid_back_and_what_its_graphs_hold():
    run = made_run(ms={"graph_layer": [8.0, 8.01]}, issue=(12.0, 8.0))
    own = run.builds[""].variants["graph_layer"]
    own.capture.made_s, own.profile.graph_time_share = 6.0, 0.873
    text = run_table.report(run)
    assert "paid back" in text.splitlines()[0] and "3,008" in text
    assert "1 graph, with 87 % of the GPU's time, made in 6.00 s with warm-up and compiler." in text
    assert max(map(len, text.splitlines())) <= run_table.WIDTH


def test_a_graph_of_compiled_modules_pays_for_the_compiler_that_another_variant_has_run():
    run = made_run(ms={"graph_layer": 8.0, "graph_step": 5.0}, names=("eager", "graph_layer", "graph_step"))
    (build,) = run.builds.values()
    for name, made_s, compile_s in (("graph_layer", 15.0, 14.0), ("graph_step", 0.5, 0.1)):
        variant = build.variants[name]
        variant.kind, variant.profile.graph_time_share = "compile", 1.0
        variant.capture.made_s, variant.capture.compile_s = made_s, compile_s
    build.variants["graph_step"].capture.report = {"compiled": 2, "from_cache": 34, "breaks": ["a.py:6: a reason"]}
    (judged,) = judge.judged(run).values()
    assert judged.made_s("graph_step") == pytest.approx(14.4) and judged.made_s("graph_layer") == 15.0
    assert judged.paid_back("graph_step") == 2880
    text = " ".join(run_table.report(run).split())
    assert "made in 14.40 s with warm-up and compiler, whose cache had 34 of 36 passes; the compiler leaves its" in text
    assert "graph at a.py:6: a reason." in text


PLAIN = {"busy_ms": 8.0, "kernels": 400, "overlap_ms": 0.5, "graph_share": 1.0}


@pytest.mark.parametrize(
    ("eager", "graph", "more", "said"),
    [
        ({"busy_ms": 9.9}, {"busy_ms": 9.9}, {}, "the GPU is the limit, busy for 99 % of an eager step"),
        ({}, {"graph_share": 0.4}, {}, "wrong part of the step, 40 % of its kernels"),
        ({}, {}, {"graphs": 100}, "too many small graphs, 100 with 4 kernels"),
        ({}, {"busy_ms": 9.0, "kernels": 440}, {}, "copies of inputs: 40 kernels more than eager, 1 ms more"),
        ({"overlap_ms": 1.5}, {"busy_ms": 9.0, "overlap_ms": 0.5}, {}, "run in turn: streams share a queue"),
        ({"overlap_ms": 1.5}, {"busy_ms": 9.0, "overlap_ms": 0.5}, {"ranks": 2}, "the end of a captured backward pass"),
        ({}, {}, {}, "none of NVIDIA's five reasons"),
    ],
)
def test_graph_that_is_not_faster_has_its_reason(eager, graph, more, said):
    run = made_run(ms={"eager": [10.0, 10.01], "graph_layer": [10.0, 10.02]}, issue=(9.0, 8.0))
    for name, own in (("eager", eager | {"graph_share": 0.0}), ("graph_layer", graph)):
        # Of two ranks the busy time of rank 0 holds waiting for the other one.
        of_ranks = {"busy_ms": 20.0, "working_ms": [7.0, (PLAIN | own)["busy_ms"]]} if "ranks" in more else {}
        for key, value in (PLAIN | own | of_ranks).items():
            setattr(run.builds[""].variants[name].profile, key, value)
    run.builds[""].variants["graph_layer"].capture.graphs = more.get("graphs", 1)
    run.ranks = more.get("ranks", 1)
    found = judge.judged(run)[""]
    assert said in run_table.reason(found, "graph_layer")
    run.device = "cpu"
    assert not run_table.reason(judge.judged(run)[""], "graph_layer")


@pytest.mark.parametrize(
    ("words", "is_limited"),
    [([], True), (["--cycles", "8"], False), (["--minutes", "3"], False), (["--host-load", "2"], False)],
)
def test_the_clock_ends_a_run_unless_its_length_was_asked_for(step, monkeypatch, words, is_limited):
    seen = []
    monkeypatch.setattr(measure, "doctor", lambda asked: (0, "", {}))
    monkeypatch.setattr(measure.run, "measured", lambda asked: seen.append(asked) or ([(None, None)], False))
    assert measure.main(["--step", step, *words]) == 1
    assert (seen[0].cycles_s is not None) == is_limited


@pytest.mark.parametrize("is_aware", [True, False])
def test_steps_that_do_otherwise_in_a_capture_are_compared_as_in_one_and_their_blocks_within_a_hundredth(
    step, monkeypatch, is_aware
):
    seen = []
    monkeypatch.setattr(measure, "doctor", lambda asked: (0, "", {"is_capture_aware": is_aware}))
    monkeypatch.setattr(measure.run, "measured", lambda asked: seen.append(asked) or ([(None, None)], False))
    measure.main(["--step", step])
    (build,) = measure.ask.ask_of(seen[0], measure.MODEL, measure.launch.describe_here()).builds
    assert ("--as-captured" in seen[0].flags) == is_aware
    graph = build.variants["graph_step"]
    # The hashes of parity stay those of equal bits.
    assert (graph["tolerance"], graph["parity"]) == (1e-2 if is_aware else None, None)
    assert build.variants["eager"]["tolerance"] is None


@pytest.mark.slow
def test_a_number_that_a_replay_freezes_is_wrong_and_named(tmp_path):
    done = measured(tmp_path, "(1.0 + count[0] % 3)")
    assert done.returncode == measure.WRONG, done.stdout + done.stderr
    assert "host value" in done.stdout and f"{tmp_path / 'my_step.py'}:12" in done.stdout


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize(
    ("given", "words"),
    [("nowhere.py", "there is no file nowhere.py"), ("my_step.py:nothing", "has no function nothing(device)")],
)
def test_a_file_without_a_step_is_refused_in_one_line(tmp_path, monkeypatch, capsys, given, words):
    monkeypatch.chdir(tmp_path)
    assert measure.main(["--step", given]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_a_number_of_cycles_that_is_none_is_refused_by_the_program_that_was_called(capsys):
    with pytest.raises(SystemExit):
        measure.main(["--step", "my_step.py", "--cycles", "0"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m benchmarks.measure: argument --cycles: '0'")


@pytest.mark.parametrize(
    ("found", "said"), [(-9, "The doctor itself failed"), (1, "The doctor itself failed"), (0, "")]
)
def test_a_run_goes_on_to_its_verdict_without_a_doctor_and_without_room_for_a_page(
    tmp_path, step, monkeypatch, capsys, found, said
):
    monkeypatch.setattr(measure, "doctor", lambda asked: (found, "", {}))
    monkeypatch.setattr(measure.run, "measured", lambda asked: ([(made_run(ms={"graph_layer": 8.0}), tmp_path)], False))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(measure.run, "write_page", full)
    assert measure.main(["--step", step]) == measure.FASTER
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "no page about the run: No space left on device" and lines[-1].startswith("Faster")
    assert said in lines[0] and ("SIGKILL" in lines[0]) == (found == -9)


NO_CAUSE = " The doctor's graph of the whole step did not show it in eight steps."


@pytest.mark.parametrize(
    ("device", "doctor", "seen", "hashes", "end"),
    [
        ("cuda", 5, {"suspects": ["a.py:9: python random"]}, "x", " Probably because of a.py:9: python random."),
        ("cuda", 0, {"whole_is_right": True}, "x", NO_CAUSE),
        ("cuda", 0, {"whole_is_right": True}, None, "in these minutes."),
        ("cuda", 6, {}, None, " The whole step could be captured here, whatever the doctor found above."),
        ("cpu", 6, {}, None, " A GPU refuses graph_step: see the doctor above."),
        ("cuda", 5, {}, None, "in these minutes."),
    ],
)
def test_the_last_line_does_not_contradict_the_doctor(device, doctor, seen, hashes, end):
    where = {"gpus": (), "device": "cpu", "preset": "tiny"} if device == "cpu" else {}
    run = made_run(ms={"graph_layer": 8.0}, **where)
    variants = run.builds[""].variants
    variants["graph_step"] = graph = variants.pop("graph_layer")
    if hashes:
        graph.parity[0].hashes, graph.parity[0].losses = [hashes], [2.0]
    status, sentence = measure._beside_doctor(run, doctor, seen)
    assert sentence.endswith(end) and sentence.startswith("Wrong numbers") == (doctor == 5 or bool(hashes))
    assert (status == measure.WRONG) == sentence.startswith("Wrong numbers")


def test_a_doctor_that_is_killed_is_told_in_one_line(step, monkeypatch, capsys):
    monkeypatch.setattr(measure, "doctor", lambda asked: (-9, "", {}))
    assert measure.main(["--step", step, "--doctor"]) == 1
    said = capsys.readouterr().err
    assert "the doctor was ended by SIGKILL" in said and said.count("\n") == 1


def test_a_root_that_cannot_be_made_is_told_before_the_doctor(step, monkeypatch, capsys):
    monkeypatch.setattr(measure, "doctor", lambda asked: pytest.fail("the doctor ran"))
    assert measure.main(["--step", step, "--out", step]) == measure.main(["--step", step, "--out", "/proc/x"]) == 2
    said = capsys.readouterr().err
    assert "File exists" in said and "/proc/x" in said and said.count("\n") == 2


def test_more_ranks_than_cores_are_refused_before_the_doctor(step, monkeypatch, capsys):
    monkeypatch.setattr(measure, "doctor", lambda asked: pytest.fail("the doctor ran"))
    monkeypatch.setattr(measure.gpus, "find_gpus", Gpus)
    assert measure.main(["--step", step, "--ngpu", "4096"]) == 2
    said = capsys.readouterr().err
    assert "--ngpu 4096 (NGPU): without a GPU a rank takes a core" in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_step_that_fails_later_is_named_with_its_line_and_no_internal_names(tmp_path):
    done = measured(tmp_path, "(1.0 if count[0] < 5 else 1 / 0)", "--quick")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "my_step.py:13: the step raised ZeroDivisionError: division by zero" in done.stdout
    assert "common.your_step" not in done.stdout + done.stderr and "digest" not in done.stdout
    assert "what the script printed" not in done.stdout


DDP = "model = torch.nn.parallel.DistributedDataParallel(model)"
FSDP = "torch.distributed.fsdp.fully_shard(model)"


@pytest.mark.slow
@pytest.mark.parametrize("shares", [DDP, FSDP])
def test_a_step_of_two_ranks_trains_alike_and_says_why_no_graph_was_tried(tmp_path, shares):
    path = tmp_path / "my_step.py"
    text = STEP.replace("SCALE", "1.0").replace(
        "optimizer = torch.optim.SGD(", f"{shares}\n    optimizer = torch.optim.SGD("
    )
    path.write_text(text.replace("import torch\n", "import torch, torch.distributed.fsdp\n", 1))
    # A variant that cannot run ends both ranks, which start again for the next one: one of them says it.
    words = ["--step", str(path), "--out", str(tmp_path / "runs"), "--ngpu", "2", "--cycles", "1"]
    words += ["--variants", "graph_step"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == measure.NOT_MEASURED, done.stdout + done.stderr
    assert "several ranks are captured on GPUs alone" in done.stdout.splitlines()[-1]
    (found,) = (tmp_path / "runs").rglob("*.json")
    (judged,) = judge.judged(run_file.read(found)).values()
    assert judged.verdicts["eager"].parity == "bitwise"
    # The slowest rank of each step, and the fastest.
    for block in judged.build.variants["eager"].blocks:
        assert len(block.fastest_ms) == block.steps
        assert all(0 < fastest <= slowest for fastest, slowest in zip(block.fastest_ms, block.step_ms, strict=True))


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on_with_the_cycles_that_were_finished(tmp_path):
    (tmp_path / "my_step.py").write_text(STEP.replace("SCALE", "1.0"))
    words = [sys.executable, "-m", "benchmarks.measure", "--step", str(tmp_path / "my_step.py")]
    words += ["--out", str(tmp_path / "runs"), "--cycles", "6"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    first = subprocess.Popen(words, **options)
    wait_for(first, "cycle 2 of 6")
    first.kill()
    first.wait()
    again = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    # A busy machine may deliver the kill some cycles late.
    assert re.search("cycles so far: [2-5]", again.stdout), again.stdout + again.stderr
    (path,) = (tmp_path / "runs").rglob("*.json")
    (build,) = run_file.read(path).builds.values()
    assert [block.cycle for block in build.variants["graph_step"].blocks] == list(range(6))


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        ("torchrun's own words", (6, "a finding", {"status": 6, "whole_is_right": False})),
        (f"{measure.PROG}: no build\n" * 2 + "torchrun", (measure.MISTAKE, "", {})),
    ],
)
def test_several_ranks_tell_their_status_in_a_file_and_a_mistake_once(step, monkeypatch, capsys, errors, found):
    def ranks(words, asks, **more):
        assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        Path(words[-1]).write_text("a finding")
        Path(words[-1]).with_suffix(".json").write_text('{"status": 6, "whole_is_right": false}')
        return SimpleNamespace(returncode=0, communicate=lambda timeout: (None, errors))

    asked = measure.request(measure.parse(["--step", f"{step}:build", "--ngpu", "2"]))
    monkeypatch.setattr(measure.supervisor, "start", ranks)
    monkeypatch.setattr(measure.supervisor, "end", lambda process, patience_s: None)
    monkeypatch.setenv(step_file.PROG, measure.PROG)
    assert measure.doctor(asked) == found
    assert capsys.readouterr().err.count("no build") == (not found[1])


MINE = """
    def mine():
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"eager": step, "mine": mine}, batches"""


@pytest.mark.slow
def test_a_capture_of_the_users_own_that_ends_its_process_has_a_row_with_the_reason(tmp_path):
    path = tmp_path / "my_step.py"
    path.write_text(STEP.replace("SCALE", "1.0").replace("\n    return step, batches", MINE))
    words = [sys.executable, "-m", "benchmarks.measure", "--step", str(path), "--out", str(tmp_path / "runs")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "your capture: the doctor was ended by SIGSEGV" in done.stdout, done.stdout + done.stderr
    assert "The doctor itself failed" not in done.stdout
    assert "failed: mine (the worker was ended by SIGSEGV)" in done.stdout
    alone = subprocess.run([*words, "--doctor"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert alone.returncode == measure.NO_CAPTURE and "was ended by SIGSEGV" in alone.stdout, alone.stderr


def test_a_variant_that_failed_otherwise_has_no_wrong_numbers():
    run = made_run(ms={"graph_layer": 8.0})
    run.builds[""].variants["graph_layer"].profile.graph_share = 0.013
    assert measure.verdict(run)[0] == measure.NO_CAPTURE


def test_a_variant_that_nobody_has_is_refused_before_anything_runs(step, capsys):
    assert measure.main(["--step", step, "--variants", "nonsense"]) == 2
    said = capsys.readouterr()
    assert "takes some of eager, graph_step" in said.err and not said.out
    assert measure.main(["--step", step, "--variants", "graph_compiled"]) == 2
    assert "variant 'graph_compiled' is now 'graph_step_compiled'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('[[3, 12], ""]', " has no torch"),
        ('[[3, 12], "2.5.1+cu124"]', " has torch 2.5.1+cu124, this takes 2.6 or newer"),
        ('[[3, 10], "2.9.0"]', " is Python 3.10, this takes 3.11 or newer"),
        ("", ": it does not run as Python does"),
    ],
)
def test_an_interpreter_that_cannot_run_a_step_is_refused_in_one_line(tmp_path, step, capsys, answer, said):
    python = program(tmp_path / "python", f"#!/bin/sh\necho '{answer}'\n")
    words = ["--step", step, "--out", str(tmp_path), "--python", python]
    assert measure.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err == f"python -m benchmarks.measure: --python {python}{said}\n" and not printed.out


def test_versions_are_those_of_the_interpreter():
    done = subprocess.run([sys.executable, "-c", measure.VERSIONS], capture_output=True, text=True)
    assert json.loads(done.stdout) == [list(sys.version_info[:2]), importlib.metadata.version("torch")]


def test_json_holds_the_verdict_and_its_numbers_and_nothing_else_is_printed(tmp_path, step, monkeypatch, capsys):
    monkeypatch.setattr(measure, "doctor", lambda asked: print("the doctor's words") or (0, "", {}))
    monkeypatch.setattr(measure.run, "measured", lambda asked: ([(made_run(ms={"graph_layer": 8.0}), tmp_path)], False))
    monkeypatch.setattr(measure.run, "page_line", lambda *_: "a page")
    assert measure.main(["--step", step, "--json"]) == measure.FASTER
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["verdict"], told["status"], told["run"]) == ("faster", measure.FASTER, str(tmp_path))
    graph = told["variants"]["graph_layer"]
    assert (graph["ms"], graph["ratio"]) == pytest.approx((8.0, told["step_ms"] / 8.0))
    assert graph["low"] <= graph["ratio"] <= graph["high"]
    assert told["text"].startswith("Faster") and "the doctor's words" in printed.err


def test_the_quick_answer_has_a_page_and_the_step_on_the_roofline(tmp_path, step, monkeypatch, capsys):
    """10 ms of the host's and 5 ms of the GPU's for 100 kernels."""
    run = made_run(issue=(10.0, 5.0), kernels=100)
    del run.builds[""].variants["graph_layer"]
    monkeypatch.setattr(measure.run, "measured", lambda asked: ([(run, tmp_path)], False))
    monkeypatch.setattr(measure.run, "page_line", lambda *_: "a page")
    assert measure.main(["--step", step, "--quick", "--json"]) == measure.NOT_MEASURED
    printed = capsys.readouterr()
    roof = json.loads(printed.out)["roofline"]
    assert roof == pytest.approx({"kernel_us": 50.0, "host_us": 100.0, "gain": 2.0}) and "a page\n" in printed.err
