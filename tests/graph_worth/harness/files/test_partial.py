"""graph_worth/harness/files/partial.py: what of a partial file goes into the run file."""

from graph_worth.harness.files import partial, run_file
from tests.helpers.made_run import HEADER, add_cycle


def test_a_run_file_names_no_folder_of_the_machine(tmp_path):
    own = partial.Partial(tmp_path / "a.partial.jsonl")
    flags = ["--data", "/home/me/my speech/train", "--step=/home/me/my_step.py:build"]
    own.add("header", **HEADER | {"flags": flags})
    worker = {"config": {"data": "/home/me/my/train", "layers": 2}, "card": ["shards of /home/me/x"], "notes": []}
    host = {"gpus": [], "versions": {"torch": "2.13"}}
    own.add("worker", build="", host=host, unit="samples", **worker)
    own.add("plan", build="", base="eager")
    add_cycle(own, 0, {"eager": 10.0})
    reason = "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/x.bin'"
    own.add("left_out", build="", variant="graph_step", kind="error", reason=reason)
    run = partial.folded(own.facts)
    assert run.flags == ["--data", "train", "--step=my_step.py:build"]
    (build,) = run.builds.values()
    assert build.config == {"data": "train", "layers": 2} and build.card == ["shards of x"]
    assert build.variants["graph_step"].raised.reason.endswith("directory: 'x.bin'")
    assert b"/home" not in run_file.as_bytes(run)
