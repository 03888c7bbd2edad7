"""`make bench`: cycles of blocks on the CPU, with a model whose variants are sound, lie or break."""

import itertools
import json
import os
import re
import signal
import statistics
from types import SimpleNamespace

import pytest

from benchmarks import frame
from graph_worth.folders import ROOT
from graph_worth.harness import ask, judge, run
from graph_worth.harness.builds.audit import AUDITS
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Reruns
from graph_worth.harness.processes import launch, supervisor
from tests.helpers.bench_process import MODEL, bench, only_run, only_variants, only_verdicts, start, wait_for, workers
from tests.helpers.made_run import HEADER, add_cycle, put
from tests.helpers.once import once
from tests.helpers.processes import until
from tests.lying_model.variants import BREAKS, FOUND_BY_AUDITS, LIARS
from tests.lying_model.variants import SOUND as ALL_SOUND

SOUND = [name for name in ALL_SOUND if "room" not in name]
# Their threads, memory or late updates would be seen in the blocks of others.
DISTURBING = ("late_update", "leak", "threads", "grows_in_enter", "grows_in_leave", "grows_untimed")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """All sound variants, in two quiet cycles and two beside a busy process."""

    def make(out):
        done = bench(out, ["eager", *SOUND], "--host-load", 1, "--cycles", 2)
        return {name: getattr(done, name) for name in ("returncode", "stdout", "stderr")}

    out, done = once(tmp_path_factory, "sound", make)
    return SimpleNamespace(**done), out


@pytest.mark.slow
def test_sound_variants_pass_and_train_alike(sound):
    done, out = sound
    assert done.returncode == 0, done.stdout + done.stderr
    for name, own in only_verdicts(out).items():
        assert (own.status, own.reason) == ("pass", ""), name
        if name != "control":
            assert (own.parity, own.after) == ("bitwise", "bitwise")


@pytest.mark.slow
def test_a_run_is_one_file_that_may_not_be_written(sound):
    _, out = sound
    (path,) = out.rglob("*.json")
    assert path.stat().st_mode & 0o222 == 0
    assert not list(out.rglob(f"*{partial.SUFFIX}"))
    assert run_file.as_bytes(run_file.read(path)) == path.read_bytes()
    assert not any(f'"{word}"' in path.read_text() for word in ("pass", "failed", "status"))


def test_blocks_of_a_build(sound):
    """A cycle has the base first and last and another order each time. All make the same steps in one process."""
    (build,) = only_run(sound[1]).builds.values()
    rows = [(block.cycle, block.place, name) for name, own in build.variants.items() for block in own.blocks]
    orders = [[name for cycle, _, name in sorted(rows) if cycle == number] for number in range(4)]
    for order in orders:
        assert order[0] == order[-1] == build.anchor
        assert sorted(order) == sorted([*build.variants, build.anchor])
    assert len(set(map(tuple, orders))) > 1 and [cycle.order for cycle in build.cycles] == orders
    assert all(cycle.operator_us for cycle in build.cycles)
    blocks = [block for own in build.variants.values() for block in own.blocks]
    assert len({(b.steps, b.untimed_steps, b.drained_steps, b.process) for b in blocks}) == 1
    assert {(b.cycle, b.busy_processes) for b in blocks} == {(cycle, cycle % 2) for cycle in range(4)}


def test_steps_that_ran_again_are_counted_in_the_timed_part_of_each_block(sound):
    done, out = sound
    variants = only_variants(out)
    assert all(block.reruns is None for block in variants["graph_step"].blocks)
    blocks = variants["graph_halves"].blocks
    assert [block.reruns for block in blocks] == [
        Reruns(steps=block.steps, reruns=block.steps, rerun_ms=2.0) for block in blocks
    ]
    steps = sum(block.steps for block in blocks)
    line = f"graph_halves: {steps} of {steps:,} timed steps ran again without fixed buffers, which took 2.00 ms each."
    assert line in done.stdout.splitlines()


def test_the_printed_table(sound):
    done, out = sound
    assert "quiet cycles:" in done.stdout and "beside 1 busy processes:" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("graph_") and ":" not in line]
    assert len(rows) == 2 * 4
    for row in rows:
        assert float(row[1]) / float(row[2]) == pytest.approx(float(row[3].rstrip("x")), rel=0.02)
    assert max(len(line) for line in done.stdout.splitlines() if f"{out}" not in line) <= 100


def test_the_last_line_names_a_page_about_the_run(sound):
    done, out = sound
    (path,) = out.rglob("*.json")
    page = ROOT / done.stdout.split()[-1]
    assert page.samefile(path.with_suffix(".html"))
    assert "On a CPU this shows that the variants train alike." in page.read_text()


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A run with variants in three processes, killed when the first one has measured a cycle, and gone on with."""

    def make(out):
        names = ["eager", "graph_step", "graph_aside", "graph_aside_too", "graph_alone"]
        killed = start(out, names, "--cycles", 2)
        seen = wait_for(killed, "1 of 3: aside, in a process of its own with eager: eager, graph_aside")
        seen += wait_for(killed, "cycle 1 of 2")
        killed.kill()
        killed.communicate(timeout=120)
        done = bench(out, names, "--cycles", 2)
        return {"seen": seen, "stdout": done.stdout, "returncode": done.returncode}

    out, done = once(tmp_path_factory, "apart", make)
    return SimpleNamespace(**done), out


@pytest.mark.slow
def test_variants_that_stand_apart_share_a_process_with_eager_and_the_control_is_in_the_usual_one(apart):
    done, out = apart
    assert done.returncode == 0, done.stdout
    assert "goes on with" in done.stdout and "cycles so far: 1" in done.stdout
    facts = only_run(out)
    assert {name: sorted(build.variants) for name, build in facts.builds.items()} == {
        "": ["control", "eager", "graph_step"],
        "+aside": ["eager", "graph_aside", "graph_aside_too"],
        "+alone": ["eager", "graph_alone"],
    }
    assert [build.apart for build in facts.builds.values()] == ["", "aside", "alone"]
    processes = [
        {block.process for variant in build.variants.values() for block in variant.blocks}
        for build in facts.builds.values()
    ]
    assert all(mine.isdisjoint(theirs) for mine, theirs in itertools.combinations(processes, 2))
    assert len(processes[0]) == len(processes[2]) == 1, "the second one was killed"
    for judged in judge.judged(facts).values():
        assert judged.base == "eager" and set(verdict.status for verdict in judged.verdicts.values()) == {"pass"}


@pytest.mark.slow
def test_ratios_of_variants_that_stand_apart_are_to_the_eager_of_their_process(apart):
    done, out = apart
    builds = judge.judged(only_run(out))
    for judged, name in zip(builds.values(), ("graph_step", "graph_aside", "graph_alone"), strict=True):
        bases = [block.mean_ms for block in judged.build.variants["eager"].blocks]
        assert judged.ratio_of(name).base_ms == pytest.approx(statistics.geometric_mean(bases), rel=1e-6)
    assert "alone, in a process of its own with eager:" in done.stdout
    line = "Each ratio compares with the eager of its own table, which ran in the same process."
    assert done.stdout.splitlines().count(line) == 1
    # In tables over runs they belong to one workload, and eager and its control are there once.
    points = frame.read(out)
    assert points["workload"].nunique() == 1 and list(points["variant"]).count("control") == 1
    assert dict(zip(points["variant"], points["process"], strict=True)) == {
        "eager": "",
        "graph_step": "",
        "control": "",
        "graph_aside": "+aside",
        "graph_aside_too": "+aside",
        "graph_alone": "+alone",
    }
    notes = {row.variant: row.note for row in frame.load(out).records()}
    assert [name for name, note in notes.items() if "in a process of its own with eager" in note] == [
        "graph_aside",
        "graph_aside_too",
        "graph_alone",
    ]


@pytest.mark.slow
def test_a_variant_that_stands_apart_can_be_measured_by_itself(tmp_path):
    done = bench(tmp_path, ["eager", "graph_alone"], "--cycles", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(only_run(tmp_path).builds) == ["+alone"] and "Each ratio compares" not in done.stdout
    assert {row.variant for row in frame.load(tmp_path).records()} == {"eager", "graph_alone", "control"}


@pytest.mark.slow
def test_liars_are_named_with_what_they_did(tmp_path):
    names = [name for name in LIARS if name not in DISTURBING]
    # In one cycle that begins at step 0, one in 65, `remembers` has no step to remember.
    done = bench(tmp_path, ["eager", "graph_step", *names], "--cycles", 2, "--no-control")
    variants = only_verdicts(tmp_path)
    assert done.returncode == 1
    assert variants["graph_step"].status == "pass", variants["graph_step"].reason
    for name in names:
        said = variants[name].reason
        assert variants[name].status == "failed" and (LIARS[name] in said or "parity" in said), (name, said)


@pytest.mark.slow
@pytest.mark.parametrize("names", [DISTURBING[:1], DISTURBING[1:3], DISTURBING[3:]], ids=str)
def test_a_liar_that_disturbs_others_is_named(names, tmp_path):
    bench(tmp_path, ["eager", *names], "--cycles", 3, "--no-control")
    variants = only_verdicts(tmp_path)
    # Several checks see it, in an order that depends on the host.
    assert [variants[name].status for name in names] == ["failed"] * len(names), variants


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_BY_AUDITS)
def test_what_another_process_cannot_repeat_fails(name, tmp_path):
    bench(tmp_path, ["eager", "graph_step", name], "--cycles", 3, "--no-control", audits=True)
    verdicts, (failed, said) = only_verdicts(tmp_path), FOUND_BY_AUDITS[name]
    assert verdicts[failed].status == "failed" and said in verdicts[failed].reason, verdicts
    if failed == name:
        assert verdicts["graph_step"].status == verdicts["eager"].status == "pass", verdicts
    for own in only_variants(tmp_path).values():
        assert all(each.repetition for each in own.audits) and len(own.audits) == AUDITS


@pytest.mark.slow
def test_what_breaks_is_left_out_and_the_rest_is_measured(tmp_path):
    done = bench(tmp_path, ["eager", "graph_step", *BREAKS], "--limit-s", 20)
    variants = only_verdicts(tmp_path)
    assert done.returncode == 1
    assert variants["graph_step"].status == "pass"
    assert len(only_variants(tmp_path)["graph_step"].blocks) == 3
    for name, said in BREAKS.items():
        assert variants[name].status != "pass" and said in variants[name].reason, (name, variants[name].reason)


@pytest.mark.slow
def test_threads_that_outlive_a_variant_end_that_variant_alone(tmp_path):
    names = ["haunts", "haunts_unsupported", "haunts_later"]
    done = bench(tmp_path, ["eager", "graph_step", *names])
    variants = only_verdicts(tmp_path)
    assert variants["eager"].status == variants["graph_step"].status == variants["control"].status == "pass", (
        done.stdout
    )
    for name in names:
        assert variants[name].status != "pass" and BREAKS[name] in variants[name].reason, (name, variants[name].reason)


@pytest.mark.slow
def test_what_does_not_fit_together_has_a_process_for_each_block(tmp_path):
    done = bench(tmp_path, ["eager", "graph_room", "graph_room_too"], "--cycles", 1, "--no-control")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each block has a process of its own" in done.stdout
    variants = only_variants(tmp_path)
    assert {own.status for own in only_verdicts(tmp_path).values()} == {"pass"}
    for own in variants.values():
        assert own.apart and own.blocks
    processes = [block.process for own in variants.values() for block in own.blocks]
    assert len(set(processes)) == len(processes) == 4


# ------------------------------------------------------------------------------------------------
# Kills


@pytest.mark.slow
def test_after_a_hang_up_and_after_a_kill_the_same_command_goes_on(tmp_path):
    # A busy machine may deliver a kill some cycles late.
    more = (["eager", "graph_step"], "--cycles", 8)
    first = start(tmp_path, *more)
    wait_for(first, "cycle 1 of 8")
    # A first Ctrl-C would leave a file from the second cycle on.
    first.send_signal(signal.SIGHUP)
    said, _ = first.communicate(timeout=240)
    assert first.returncode == 130 and "the same command goes on" in said
    (path,) = tmp_path.rglob(f"*{partial.SUFFIX}")
    facts = [json.loads(line) for line in path.read_bytes().splitlines()]
    kept = next(fact for fact in facts if fact["fact"] == "block" and fact["variant"] == "graph_step")

    second = start(tmp_path, *more)
    assert "goes on with" in wait_for(second, "cycle 6 of 8")
    sockets = set(workers().values())
    second.kill()
    second.wait()
    assert until(lambda: not sockets & set(workers().values())), "a worker is left"
    # A kill within a write leaves half a line.
    with open(path, "ab") as file:
        file.write(b'{"fact":"block","ms"')

    third = bench(tmp_path, *more)
    assert "goes on with" in third.stdout and third.returncode == 0, third.stdout + third.stderr
    blocks = only_variants(tmp_path)["graph_step"].blocks
    assert [b.cycle for b in blocks] == list(range(8)) and len({b.process for b in blocks}) == 3
    assert blocks[0].step_ms == kept["step_ms"]


@pytest.mark.slow
def test_a_stop_after_two_cycles_leaves_a_file_and_no_worker(tmp_path):
    process = start(tmp_path, ["eager", "graph_step"], "--cycles", 200)
    wait_for(process, "cycle 2 of 200")
    # `timeout` sends both. A second SIGTERM ends the run, if it is late (test_measured_once.py).
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    run = only_run(tmp_path)
    (build,) = run.builds.values()
    assert process.returncode == 130 and run.stopped == "SIGTERM" and 2 <= len(build.cycles) < 200, said
    assert said.count("stopped after") == 1 and "measured again" not in said, said
    assert "not checked: eager, graph_step (stopped by SIGTERM" in said, said
    assert judge.is_sound(run) and not list(tmp_path.rglob(f"*{partial.SUFFIX}")) and "Traceback" not in said


@pytest.mark.slow
def test_after_a_crash_and_after_a_kill_of_the_worker_another_worker_goes_on(tmp_path):
    process = start(tmp_path, ["eager", "graph_step", "segfault"], "--cycles", 6, "--no-control")
    wait_for(process, "cycle 1 of 6")
    for pid in workers().keys() & set(supervisor.descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=240)
    variants = only_verdicts(tmp_path)
    assert (variants["segfault"].status, variants["segfault"].reason) == ("failed", "the worker was ended by SIGSEGV")
    assert variants["eager"].status == variants["graph_step"].status == "pass"
    blocks = only_variants(tmp_path)["graph_step"].blocks
    assert [b.cycle for b in blocks] == list(range(6)) and len({b.process for b in blocks}) == 2


@pytest.mark.parametrize("step_ms", ["[-1.0]", "[1e999]", "[NaN]", "7", '["a"]', "{}", "null"])
def test_a_damaged_run_that_was_begun_is_named_in_one_line(tmp_path, monkeypatch, step_ms):
    monkeypatch.setattr(run, "_header", lambda asked, args: HEADER)
    own = partial.Partial(tmp_path / f"run{partial.SUFFIX}")
    own.add("header", **HEADER)
    add_cycle(own, 0, {"eager": 10.0, "graph_step": 8.0})
    own.close()
    found = run.open_run(SimpleNamespace(group=tmp_path), None)
    assert found.path == own.path
    found.close()
    own.path.write_text(re.sub(r'(?<="step_ms":)\[8[^]]*]', step_ms, own.path.read_text()))
    with pytest.raises(run.Mistake, match=r"run.partial.jsonl is damaged .*: move it away to begin anew") as mistake:
        run.open_run(SimpleNamespace(group=tmp_path), None)
    assert "\n" not in str(mistake.value)


def test_a_run_that_was_begun_goes_on_only_with_the_same_host_load(tmp_path):
    names = []
    for flags in ([], ["--host-load", "1"], ["--host-load", "1"], ["--limit-s", "7"]):
        options = run.parse(["--model", "gpt3", "--preset", "tiny", "--out", str(tmp_path), *flags])
        request = ask.ask_of(options, "gpt3", launch.describe_here())
        # A host load ends the folder's name, too.
        request.label = ""
        begun = run.open_run(request, options)
        names.append(begun.path.name)
        begun.close()
    assert names[0] != names[1] == names[2] and names[3] == names[0]


# ------------------------------------------------------------------------------------------------
# The command line, and several ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nope"], "unknown model 'nope'"),
        (["--model", MODEL, "--variants", "graph"], "variant 'graph' is now 'graph_step'"),
        (["--model", MODEL, "--variants", "nope"], "unknown variant 'nope'"),
        (["--model", MODEL, "--layers", "4"], "flags of the training script come after --, as in -- --layers 4"),
        (["--model", MODEL, "--cycles", "0"], "'0' is not a number of cycles"),
        (["--model", MODEL, "--preset", "bench"], "needs an NVIDIA GPU"),
        (["--model", MODEL, "--", "--width", "x"], "'x' is not of type int"),
        (["--model", MODEL, "--out", "results/x"], "results/ grows by make publish"),
        (["--model", MODEL, "--ngpu", "4096"], "--ngpu 4096 (NGPU): without a GPU a rank takes a core"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys, monkeypatch):
    monkeypatch.setattr(run.command.signal, "signal", lambda *_: None)
    try:
        status = run.main(words)
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and said in line


@pytest.mark.slow
def test_ranks_measure_the_same_blocks(tmp_path):
    done = bench(tmp_path, ["eager", "graph_step"], "--ngpu", 2, "--cycles", 1, "--no-control")
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_run(tmp_path).ranks == 2
    assert [len(own.blocks) for own in only_variants(tmp_path).values()] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "failed: eager (rank 1 ended with exit status 7)"),
        ("refuses", "failed: eager (--width 8 is refused)"),
        ("killed", "failed: eager (rank 1 was ended by SIGKILL)"),
        ("out_of_memory", "oom: eager (rank 1: out of memory"),
        ("hangs", "timeout: eager (no answer for 20 s in"),
    ],
)
def test_a_rank_that_breaks_is_named(tmp_path, how, said):
    more = ("--ngpu", 2, "--cycles", 1, "--no-control", "--limit-s", 20 if how == "hangs" else 600)
    done = bench(tmp_path, ["eager"], *more, flags=["--die-rank", "1", "--die-how", how])
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr


def test_a_suite_that_was_stopped_goes_on_with_the_model_that_is_left(tmp_path, capsys):
    args = run.parse(["--model", f"{MODEL},{MODEL}", "--out", str(tmp_path)])
    asked = SimpleNamespace(name="a/tiny", root=tmp_path, host={"env": {"boot_id": "b", "source_hash": "s"}})
    other = SimpleNamespace(**{**vars(asked), "name": "b/tiny"})
    path = put(tmp_path, 0)
    suite = run.Suite([asked, other], args)
    suite.note(asked, (run_file.read(path), path))
    again = run.Suite([asked, other], args)
    assert again.measured(asked)[1] == path and again.measured(other) is None
    assert "was measured before" in capsys.readouterr().out
    again.end()
    assert run.Suite([asked, other], args).measured(asked) is None
