"""Training scripts as processes that begin with torch imported: forked from a server that has done nothing else.

`python -m MODEL.train` imports for three seconds of CPU time, and tests make dozens of short runs. What the script does
is the same: it runs as __main__, with arguments, environment, output and exit status of its own.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# None of them the repository's: a script's own imports stay its own.
PRELOADED = ["numpy", "torch", "torch.distributed", "torch.profiler", "torch._dynamo", "torch._inductor.config"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def run(module, arguments, environment, timeout_s) -> subprocess.CompletedProcess:
    """`python -m module arguments...` in the repository's root, as subprocess.run with captured text.

    Raises subprocess.TimeoutExpired, and has killed the process then. Several threads may call it at a time.
    """
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        # Its parent process is the server; it is waited for here all the same.
        process = _context.Process(target=_main, args=(module, list(arguments), dict(environment), *map(str, outputs)))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s)
        stdout, stderr = (path.read_text() if path.exists() else "" for path in outputs)
        return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)


def refusal(model, *arguments):
    """The one line on stderr of preset tiny on a CPU; on stdout no card and no table, at most that a build began."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = run(f"{model}.train", ["--preset", "tiny", *arguments], environment, timeout_s=300)
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer
    assert answer.stdout.splitlines()[1:] in ([], [f"building {model}/tiny"]), answer
    assert answer.stderr.startswith(f"python -m {model}.train: "), answer
    return answer.stderr


def _main(module, arguments, environment, stdout, stderr):
    # Else what the script starts, as DataLoader's workers, would have a server of its own, which imports torch again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # What was imported before stays; a run collects garbage before its steps.
    gc.freeze()
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    # As python -m has it: the folder first, and no name of what forked it.
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT)))]
    imported_again = {"__mp_main__"} | {
        name for name in sys.modules if name.split(".")[0] in ("tests", "benchmarks", "graph_worth")
    }
    if environment.get("TRITON_INTERPRET") == "1":
        # Triton, which torch imports, decides when it is imported. Its C++ cannot be loaded twice and does not ask.
        triton = {name for name in sys.modules if name.split(".")[0] == "triton"}
        imported_again |= {name for name in triton if not name.startswith("triton._C")}
    for name in imported_again:
        sys.modules.pop(name, None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
