"""The table of operators that a graph refuses or replays wrongly, from the newest file in results/operators.

benchmarks/operators.py measures it on a GPU, benchmarks/pages/operator_page.py prints it, and the doctor reads it.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from graph_worth.folders import CODE

PASSES = ("forward", "backward")
AGAINST = ("crashed", "refused", "wrong")
# Captured, but for random numbers there is nothing to compare a replay with.
_HELD = ("held", "random")
# Operator -> a call that a graph holds in its place, as Python reads it. x: a tensor; tests capture each on a GPU.
INSTEAD = {
    "argwhere": "torch.nonzero_static(x, size=4)",
    "nonzero": "torch.nonzero_static(x, size=4)",
    "masked_select": "torch.where(x > 2, x, 0)",
    "repeat_interleave": "x.repeat_interleave(n, output_size=10)",
    "bincount": "torch.zeros(5, device=x.device).index_add_(0, n, x)",
    "index_put": "x.masked_fill(x > 2, 0)",
    "equal": "(x == x + 1).all()",
    "allclose": "torch.isclose(x, x + 1).all()",
    "linalg.inv": "torch.linalg.inv_ex(square)",
    "linalg.solve": "torch.linalg.solve_ex(square, x)",
    "linalg.cholesky": "torch.linalg.cholesky_ex(square)",
    "cholesky": "torch.linalg.cholesky_ex(square)",
    "nn.functional.one_hot": "(n[:, None] == torch.arange(5, device=x.device)).long()",
}
# The begin of an error, and what it means.
MEANINGS = {
    "CUDA error: operation not permitted when stream is capturing": "waits for the GPU",
    "Cannot copy between CPU and CUDA tensors": "copies from or to host memory that is not pinned",
    "cusolver error": "waits for the GPU in cuSOLVER",
}
# Modules of torch whose names the operators begin with: linalg.inv is aten::linalg_inv.
_MODULES = ("linalg.", "fft.", "special.", "masked.", "signal.windows.", "sparse.")


def newest(results: Path) -> tuple[Path, dict] | None:
    """The file of the newest torch on a GPU below results/operators, and its content; None without any."""
    files = [(path, json.loads(path.read_text())) for path in sorted((results / "operators").glob("*.json"))]
    files = [(path, content) for path, content in files if content["gpu"] != "CPU"]
    return max(files, key=lambda file: (version_of(file[1]["torch"]), file[1]["begin_utc"]), default=None)


def version_of(text: str) -> list[int]:
    """Return the numbers of torch's version."""
    return [int(word) for word in text.partition("+")[0].split(".") if word.isdigit()]


def meaning_of(why: str) -> tuple[str, str]:
    """Return (which samples, as in 1 of 4, the error or its meaning) of an outcome's words."""
    samples, _, error = why.rpartition(" samples: ")
    return samples, next((meaning for begin, meaning in MEANINGS.items() if error.startswith(begin)), error)


@dataclass(frozen=True)
class Row:
    """One pass of an operator and its variants.

    Attributes:
        is_held: a graph holds every sample that was tried.
        is_refused: a graph holds none of them, or replays all wrongly.
        text: what stands against it, in words, where something does.
    """

    is_held: bool
    is_refused: bool
    text: str = ""


@functools.cache
def rows(results: Path = CODE / "results") -> dict[tuple[str, str], Row]:
    """Return (operator as aten names it, pass) -> row; operators that were not tried have none."""
    outcomes_by_pass: dict[tuple[str, str], list[dict]] = {}
    _, file = newest(results) or (None, {"operators": {}})
    for name, passes in file["operators"].items():
        for kind, entry in passes.items():
            if entry["outcome"] in (*AGAINST, *_HELD):
                outcomes_by_pass.setdefault((_aten_name(name), kind), []).append(entry)
    return {key: _row(outcomes, file) for key, outcomes in outcomes_by_pass.items()}


def _row(outcomes: list[dict], file: dict) -> Row:
    against = [entry for entry in outcomes if entry["outcome"] in AGAINST]
    if not against:
        return Row(is_held=True, is_refused=False)
    outcome, (samples, why) = against[0]["outcome"], meaning_of(against[0]["why"])
    number, _, total = samples.partition(" of ")
    words = {"crashed": "ends the process", "wrong": f"replays {why}"}.get(outcome, why)
    words += f" in {samples} samples" if samples else ""
    text = f"{words}, torch {file['torch']} on {file['gpu']}"
    return Row(is_held=False, is_refused=against == outcomes and number == total, text=text)


def row_of(name: str, kind: str = "forward") -> Row | None:
    """Return the row of an operator, such as aten::masked_fill_, aten.prod.default or Tensor.prod."""
    return rows().get((_word(name), kind))


def is_refused(name: str) -> bool:
    """Return whether a graph refuses each call of an operator, by the table; on a GPU by that of its torch alone."""
    row = row_of(name)
    return row is not None and row.is_refused and (not torch.cuda.is_available() or _is_of_this_torch())


@functools.cache
def _is_of_this_torch() -> bool:
    _, file = newest(CODE / "results") or (None, {"torch": ""})
    return version_of(file["torch"])[:2] == version_of(torch.__version__)[:2]


def instead_of(name: str) -> str:
    """Return a call that a graph holds in the place of an operator, "" where none is known."""
    return next((call for replaced, call in INSTEAD.items() if _aten_name(replaced) == _word(name)), "")


def _word(name: str) -> str:
    # Of in-place operators without the mark; so __getitem__, of which slices are held, has no row.
    parts = name.replace("::", ".").split(".")
    return parts[min(1, len(parts) - 1)].rstrip("_")


def _aten_name(name: str) -> str:
    """The name without its variant, as aten has it: max.binary is max, nn.functional.one_hot is one_hot."""
    name = name.removeprefix("nn.functional.").removeprefix("torch.ops.aten.")
    module = next((prefix for prefix in _MODULES if name.startswith(prefix)), "")
    return f"{module}{name.removeprefix(module).partition('.')[0]}".replace(".", "_")
