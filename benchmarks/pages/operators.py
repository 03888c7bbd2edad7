"""What benchmarks/operators.py found, as the table of docs/operators.md."""

import json
from collections import Counter
from pathlib import Path

from benchmarks.pages import tables
from benchmarks.runs import Found
from common.text import in_markdown

PASSES = ("forward", "backward")
AGAINST = ("crashed", "refused", "wrong")
# Operator -> a call that a graph holds in its place, as Python reads it. x: a tensor; tests capture each on a GPU.
INSTEAD = {
    "argwhere": "torch.nonzero_static(x, size=4)",
    "nonzero": "torch.nonzero_static(x, size=4)",
    "masked_select": "torch.where(x > 2, x, 0)",
    "repeat_interleave": "x.repeat_interleave(n, output_size=10)",
    "bincount": "torch.zeros(5, device=x.device).index_add_(0, n, x)",
    "index_put": "x.masked_fill(x > 2, 0)",
    "item": "x.sum()",
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
    "cusolver error": "cuSOLVER waits for the GPU",
}


def newest(results: Path) -> tuple[Path, dict] | None:
    """The file of the newest torch on a GPU below results/operators, and its content; None without any."""
    files = [(path, json.loads(path.read_text())) for path in sorted((results / "operators").glob("*.json"))]
    files = [(path, own) for path, own in files if own["gpu"] != "CPU"]
    return max(files, key=lambda each: (_version(each[1]["torch"]), each[1]["begin_utc"]), default=None)


def _said(why: str) -> tuple[str, str]:
    """(which samples, why) of an outcome's words."""
    samples, _, error = why.rpartition(" samples: ")
    return samples, next((meaning for begin, meaning in MEANINGS.items() if error.startswith(begin)), error)


def _version(text: str) -> list[int]:
    return [int(word) for word in text.partition("+")[0].split(".") if word.isdigit()]


def markdown(found: Found, page: Path, argument: str = "") -> str:
    """How many operators a graph holds, and a line for each that it does not hold or replays wrongly."""
    own = newest(found.root)
    if own is None:
        return "Not measured on a GPU yet."
    path, file = own
    counts = [Counter(each[kind]["outcome"] for each in file["operators"].values() if kind in each) for kind in PASSES]
    lines = []
    for name, passes in file["operators"].items():
        against = [kind for kind in PASSES if passes.get(kind, {}).get("outcome") in AGAINST]
        if against:
            texts = [passes[kind]["outcome"] if kind in passes else "" for kind in PASSES]
            instead = f"`{INSTEAD[name]}`" if name in INSTEAD else ""
            lines.append([f"`{name}`", *texts, *map(in_markdown, _said(passes[against[0]]["why"])), instead])
    said = "; ".join(
        f"{kind}: {', '.join(f'{number} {outcome}' for outcome, number in own.most_common())}"
        for kind, own in zip(PASSES, counts, strict=True)
    )
    source = tables.linked_file(f"torch {file['torch']}, {file['gpu']}", path, page)
    names = ["Operator", "Forward", "Backward", "Samples", "Why", "Instead"]
    return f"{source}: {said}.\n\n{tables.markdown(names, lines)}"
