"""The smallest modules that no graph can hold: each is captured alone, forward and backward, children before parents.

On a GPU a capture that fails may spoil its process. So there a child process captures one module after the other until
one fails, and the next child goes on behind it. The host graph of a CPU fails cleanly.

    python -m common.your_step.bisect my_step.py:build FILE

is such a child. It adds a line to FILE before and after each module.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from common.capture.errors import explained
from common.capture.pool import CaptureError, Pool
from common.measuring import torch_settings
from common.your_step import step_file, user_file
from common.your_step.parts import Call, first_calls, tensors_in
from common.your_step.state import StepState

ROOT = Path(__file__).resolve().parents[2]
# Exit status of a child that has met a failure, after which it captures no more.
GOES_ON = 3
MOST_CHILDREN = 4
LIMIT_S = 60.0
ENDED = "its capture ended the process"


@dataclass
class Alone:
    """Modules captured alone.

    Attributes:
        failed: path -> message, of modules whose inner modules can all be captured; of alike modules the first.
        alike: path -> number of further modules that are alike.
        passed: paths of modules that can be captured, or are alike to such a module.
        bad: paths of modules that fail or have such a module inside.
        untried: number of modules for which there was no time, or that do not run alone.
        trouble: the reason why none was captured, or "".
    """

    failed: dict[str, str] = field(default_factory=dict)
    alike: dict[str, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    untried: int = 0
    trouble: str = ""

    def text(self, names: Mapping[str, str] | None = None) -> str:
        """Return the result in a line; names: those of modules that are printed otherwise."""
        names = names or {}
        rest = f" ({self.untried} not tried)" if self.untried else ""
        if self.trouble or not (self.failed or self.passed):
            return f"no module was captured alone: {self.trouble or 'none runs by itself'}{rest}"
        if not self.failed:
            last = f", {names.get(self.passed[-1], self.passed[-1])} among them" if self.passed else ""
            return f"modules captured alone: all {len(self.passed)} succeed{last}, so the cause lies outside{rest}"
        words = []
        for path, message in self.failed.items():
            more = f", and {self.alike[path]} alike" if self.alike.get(path) else ""
            words.append(f"{names.get(path, path)}: {message}{more}")
        return f"smallest modules that fail alone: {'; '.join(words)}{rest}"


def alone(state: StepState, in_children: bool) -> Alone:
    """Capture the modules of a step one by one, here or in child processes, which build the step anew."""
    results: dict[str, str | None] = {}
    trouble = ""
    try:
        calls = first_calls(state)
        if in_children:
            # Children need the memory that the activations of this process hold.
            for call in calls:
                call.args, call.kwargs = (), {}
            if state.device.type == "cuda":
                torch.cuda.empty_cache()
            with tempfile.TemporaryDirectory() as folder:
                results, trouble = _of_children(state.text, Path(folder, "facts"))
        else:
            _try_all(state, calls, results, lambda path, failed: None)
        state.reset()
    except (RuntimeError, ValueError) as error:
        # A capture that has failed before may have spoiled the GPU for this process.
        return Alone(trouble=user_file.said(error))
    found = folded(calls, results)
    found.trouble = "" if results else trouble
    return found


def folded(calls: list[Call], results: dict[str, str | None]) -> Alone:
    """Return what the results of trials come to: path -> message, "" for no failure, None for no run alone."""
    known = {call.key: call.path for call in reversed(calls) if call.path in results}
    bad_parts: set[int] = set()
    found = Alone()
    for call in calls:
        like = known.get(call.key)
        message = None if like is None else results[like]
        if any(id(part) in bad_parts for part in call.module.modules()):
            found.bad.add(call.path)
        elif message is None:
            found.untried += 1
        elif message:
            found.bad.add(call.path)
            bad_parts.add(id(call.module))
            if like == call.path:
                found.failed[call.path] = message
            else:
                found.alike[str(like)] = found.alike.get(str(like), 0) + 1
        else:
            found.passed.append(call.path)
    return found


# ------------------------------------------------------------------------------------------------
# Trials


def _try_all(state, calls, results: dict[str, str | None], tell: Callable) -> bool:
    """Capture what has no result yet; whether it has come to the end. On a GPU the first failure ends it."""
    end_s = time.monotonic() + LIMIT_S
    for call in calls:
        found = folded(calls, results)
        is_known = any(other.key == call.key and other.path in results for other in calls)
        if is_known or call.path in found.bad or time.monotonic() > end_s:
            continue
        tell(call.path, ENDED)
        results[call.path] = _failure(call, state)
        tell(call.path, results[call.path])
        if results[call.path] and state.device.type == "cuda":
            return False
    return True


def _failure(call: Call, state: StepState) -> str | None:
    """The cause of a module's failed capture, "" where there is none, None where the module does not run alone."""
    leaves = tree_map(_static, (call.args, call.kwargs))
    static = tensors_in(leaves)
    wanted = [each for each in [*static, *call.module.parameters()] if each.requires_grad]

    def forward():
        # A module may write into its inputs, but into no leaf of autograd.
        args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, leaves)
        return call.module(*args, **kwargs)

    def differentiable(output):
        return [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def backward(needed, incoming):
        return torch.autograd.grad(needed, wanted, incoming, allow_unused=True)

    cast = torch.autocast(state.device.type, call.casts_to, call.casts_to is not None, cache_enabled=False)
    pool = Pool(state.device)
    for generator in state.snapshot.generators:
        pool.register_generator(generator)
    try:
        with torch.set_grad_enabled(call.has_grad), cast:
            try:
                needed = differentiable(forward())
                if needed and wanted:
                    backward(needed, [torch.zeros_like(each) for each in needed])
            except Exception:
                return None
            needed = differentiable(pool.capture(forward, static)[1])
            incoming = [torch.zeros_like(each) for each in needed]
        if needed and wanted:
            pool.capture(lambda: backward(needed, incoming), incoming)
    except (CaptureError, torch.OutOfMemoryError) as error:
        said = str(error).splitlines()[0][:400] if str(error) else type(error).__name__
        return explained(said, error.reason if isinstance(error, CaptureError) else "")[0] or said
    finally:
        if state.device.type == "cpu":
            pool.release()
    return ""


def _static(leaf):
    """A copy of a tensor that lies outside of the graph."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


# ------------------------------------------------------------------------------------------------
# Child processes


def _of_children(step: str, path: Path) -> tuple[dict[str, str | None], str]:
    """(results, last words) of child processes, each of which goes on behind the failure of the one before."""
    end_s, said = time.monotonic() + LIMIT_S, f"no answer in {LIMIT_S:g} s"
    for _ in range(MOST_CHILDREN):
        words = [sys.executable, str(ROOT / step_file.START), "common.your_step.bisect", step, str(path)]
        before = path.stat().st_size if path.is_file() else 0
        try:
            left_s = max(1.0, end_s - time.monotonic())
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False)
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
        except subprocess.TimeoutExpired:
            found = _read(path)
            # The module at which the child was stopped counts as not tried.
            return found | {each: None for each, failed in list(found.items())[-1:] if failed == ENDED}, said
        # A child that has told nothing cannot build the step beside this process, as for want of memory.
        if done.returncode == 0 or not path.is_file() or path.stat().st_size == before:
            break
    return _read(path), said


def _read(path: Path) -> dict[str, str | None]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return dict(map(json.loads, lines))


def main(argv=None) -> int:
    """Capture modules until one fails; return 0 where none is left, else GOES_ON."""
    step, name = sys.argv[1:] if argv is None else argv
    path = Path(name)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch_settings.prepare(device)
    state = StepState(step, device, "the doctor")
    with path.open("a") as file:

        def tell(path, failed):
            print(json.dumps([path, failed]), file=file, flush=True)

        return 0 if _try_all(state, first_calls(state), _read(path), tell) else GOES_ON


if __name__ == "__main__":
    sys.exit(main())
