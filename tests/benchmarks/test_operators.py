"""benchmarks/operators.py and its page: what came of each operator, also where it ended its process."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import frame, operators
from benchmarks.pages import operator_page as page
from graph_worth.capture.pool import Pool
from graph_worth.measuring import captured_operators as tried
from graph_worth.measuring import operator_table

CPU = torch.device("cpu")
NEEDS_SAMPLES = pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's samples need it")
# Says what the operators' names tell: "dies" ends the process, "unsound" ends it after its outcome.
FAKE = """
import json, sys
for name in sys.stdin.read().split():
    if name == "unwritten":
        continue
    print(json.dumps({"operator": name, "pass": "forward"}), flush=True)
    if name == "dies":
        sys.exit(9)
    print(json.dumps({"operator": name, "pass": "forward", "outcome": "held", "why": ""}), flush=True)
    if name == "unsound":
        break
"""


def test_a_process_that_ends_is_started_again_behind_its_operator(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(operators, "CHILD", (str(tmp_path / "fake.py"),))
    rows = operators.surveyed(["a", "dies", "b", "unsound", "c", "unwritten"], "cpu")
    assert [(row["operator"], row["outcome"]) for row in rows] == [
        *(("a", "held"), ("dies", "crashed"), ("b", "held"), ("unsound", "held"), ("c", "held"))
    ]
    assert rows[1]["why"] == "its process ended with status 9"


def test_a_silent_process_is_ended(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE.replace("sys.exit(9)", "import time; time.sleep(600)"))
    monkeypatch.setattr(operators, "CHILD", (str(tmp_path / "fake.py"),))
    monkeypatch.setattr(operators, "SILENT_S", 3)
    rows = operators.surveyed(["dies", "a"], "cpu")
    assert [row["outcome"] for row in rows] == ["crashed", "held"] and "status -9" in rows[0]["why"]


def fake(function):
    """An operator of one sample, whose values differ between two draws."""

    def sample_inputs(device, dtype, requires_grad):
        x = torch.rand(4, device=device, dtype=dtype, requires_grad=requires_grad)
        return [SimpleNamespace(input=x, args=(), kwargs={}, output_process_fn_grad=lambda y: y)]

    def call(x, *args, **kwargs):
        return function(x, *args, **kwargs)

    call.sample_inputs, call.supports_autograd = sample_inputs, True
    call.supported_dtypes = call.supported_backward_dtypes = lambda device: {torch.float32}
    return call


def frozen():
    """Twice the values of the tensor that it sees first, once those of another: of the one that is captured."""
    seen = []
    return lambda x: (seen.append(x), x * (2 if seen[0] is x else 1))[1]


@pytest.mark.parametrize(
    ("function", "outcome", "why"),
    [
        (lambda x: x * 2, "held", ""),
        (lambda x: x[x > 0.5], "refused", "1 of 1 samples: aten.index"),
        (frozen(), "wrong", "1 of 1 samples: other values than eager's"),
        (lambda x: x + torch.rand(4), "random", "call to call"),
        (lambda x: x.no_such_thing, "not tried", "no_such_thing"),
    ],
)
def test_what_came_of_an_operator(function, outcome, why):
    found = tried.of_operator(fake(function), CPU, False)
    assert found[0] == outcome and why in found[1] and "\n" not in found[1] and "/" not in found[1]


def test_gradients_are_compared_too():
    assert tried.of_operator(fake(lambda x: x**2), CPU, True) == ("held", "")
    assert tried.of_operator(fake(frozen()), CPU, True)[0] == "wrong"
    assert tried.of_operator(fake(lambda x: x.detach()), CPU, True)[0] == "not tried"


@NEEDS_SAMPLES
@pytest.mark.slow
def test_the_file_has_every_outcome_and_an_unknown_name_is_refused(tmp_path, capsys):
    words = ["--out", str(tmp_path), "--processes", "2", "--operators"]
    assert operators.main([*words, "add,nonzero,uniform"]) == 0
    (path,) = tmp_path.glob("cpu-torch*.json")
    found = {
        (name, kind): own["outcome"]
        for name, passes in json.loads(path.read_text())["operators"].items()
        for kind, own in passes.items()
    }
    assert found == {
        **{("add", kind): "held" for kind in tried.PASSES},
        ("uniform", "forward"): "random",
        ("nonzero", "forward"): "refused",
    }
    assert operators.main([*words, "no_such_operator"]) == 2
    assert "--operators no_such_operator: torch" in capsys.readouterr().err


SOME = "refused", "2 of 4 samples: Cannot copy between CPU and CUDA tensors"
NOT_TRIED = {"outcome": "not tried", "why": "no dtype"}


def put(folder, name, **file):
    passes = {"forward": {"outcome": "refused", "why": "1 of 4 samples: a | b"}}
    own = {"torch": "2.11.0", "gpu": "NVIDIA H200", "begin_utc": "2026", "operators": {"nonzero": passes, "add": {}}}
    (folder / "operators").mkdir(exist_ok=True)
    (folder / "operators" / name).write_text(json.dumps(own | file))


def test_the_page_has_the_newest_torch_on_a_gpu(tmp_path):
    assert "Not measured" in page.markdown(frame.load(tmp_path), tmp_path / "operators.md")
    put(tmp_path, "a.json", torch="2.9.1+cu130")
    put(tmp_path, "b.json", torch="2.11.0+cu130")
    put(tmp_path, "c.json", torch="2.13.0", gpu="CPU")
    found = frame.load(tmp_path)
    assert not found.faults
    text = page.markdown(found, tmp_path / "operators.md")
    assert text.startswith("[torch 2.11.0+cu130, NVIDIA H200](operators/b.json): forward: 1 refused; backward: .")
    assert "| `nonzero` | 1 of 4 | a \\| b | `torch.nonzero_static(x, size=4)` |" in text
    assert "`add`" not in text


def test_operators_without_a_call_in_their_place_are_named_by_outcome(tmp_path):
    def of(outcome, samples):
        return {"outcome": outcome, "why": f"{samples} samples: a"}

    operators = {
        "add": {"forward": of("held", "4 of 4"), "backward": of("held", "4 of 4")},
        "cov": {"forward": of("refused", "4 of 4"), "backward": of("refused", "4 of 4")},
        "lu": {"forward": of("refused", "2 of 4")},
        "isin": {"forward": of("refused", "1 of 4")},
        "prod": {"forward": of("held", "4 of 4"), "backward": of("refused", "3 of 4")},
        "flash": {"forward": of("wrong", "1 of 4")},
    }
    put(tmp_path, "a.json", operators=operators)
    assert page.markdown(frame.load(tmp_path), tmp_path / "operators.md").split("\n\n")[2:] == [
        "Refused in all samples: `cov`.",
        "Refused in some samples: `lu`, `isin`.",
        "Refused in the backward alone: `prod`.",
        "Wrong in some samples: `flash`.",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(operator_table.INSTEAD))
def test_a_graph_holds_the_call_that_takes_an_operators_place(name):
    torch.cuda.set_stream(torch.cuda.Stream())
    x = torch.arange(1.0, 5.0, device="cuda")
    given = {"torch": torch, "x": x, "n": x.long(), "square": torch.eye(4, device="cuda") + x}
    given["square"] = given["square"] @ given["square"].T
    eval(operator_table.INSTEAD[name], dict(given))
    pool = Pool(torch.device("cuda"))
    graph, result = pool.capture(lambda: eval(operator_table.INSTEAD[name], dict(given)), (x,))
    x.mul_(1)
    graph.replay()
    expected = eval(operator_table.INSTEAD[name], dict(given))
    for got, want in zip(*([*each] if isinstance(each, tuple) else [each] for each in (result, expected)), strict=True):
        torch.testing.assert_close(got, want)
    pool.release()


@pytest.mark.parametrize("name", sorted(operator_table.INSTEAD))
def test_the_call_in_an_operators_place_runs(name):
    x = torch.arange(1.0, 5.0)
    square = (torch.eye(4) + x) @ (torch.eye(4) + x).T
    assert eval(operator_table.INSTEAD[name], {"torch": torch, "x": x, "n": x.long(), "square": square}) is not None


def test_the_table_is_looked_up_by_the_names_of_aten(tmp_path):
    why = "4 of 4 samples: CUDA error: operation not permitted when stream is capturing"
    refused, held, some = ({"forward": {"outcome": o, "why": w}} for o, w in (("refused", why), ("held", ""), SOME))
    rows = {"linalg.inv": refused, "max.binary": held, "max.reduction": held, "norm": held, "norm.nuc": refused}
    rows |= {"frozen": {"forward": {"outcome": "wrong", "why": "2 of 2 samples: other values than eager's"}}}
    rows |= {"dies": {"forward": {"outcome": "crashed", "why": "its process ended with status 9"}}}
    put(tmp_path, "a.json", operators=rows | {"masked.sum": some, "sum": held, "clone": {"forward": NOT_TRIED}})
    found = {name: row for (name, kind), row in operator_table.rows(tmp_path).items() if kind == "forward"}
    assert {name for name, row in found.items() if row.is_held} == {"max", "sum"}
    assert {name for name, row in found.items() if row.is_refused} == {"linalg_inv", "frozen", "dies"}
    assert found.keys() == {"linalg_inv", "max", "norm", "masked_sum", "sum", "frozen", "dies"}
    assert found["frozen"].text.startswith("replays other values than eager's in 2 of 2 samples, torch")
    assert found["dies"].text == "ends the process, torch 2.11.0 on NVIDIA H200"
    assert found["linalg_inv"].text == "waits for the GPU in 4 of 4 samples, torch 2.11.0 on NVIDIA H200"


@pytest.mark.parametrize("name", ["aten::max", "aten.max.dim", "Tensor.max", "max", "aten::max_"])
def test_an_operator_has_its_row_by_each_of_its_names(name):
    assert operator_table.row_of(name).is_held and operator_table.row_of("__getitem__") is None
