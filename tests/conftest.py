"""Settings of all tests: one thread for each process, and a reason to skip where hardware is missing."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

# A shell that starts tests in the background lets them ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP. A handler is not inherited, and this one does nothing.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Before any test imports torch: processes of one test share few cores, and idle threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi"):
    # cuDNN's recurrent layers are deterministic with it alone.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Files whose tests run in one process, one after the other: they share a cluster, or jobs that run for a minute.
IN_ONE_PROCESS = ("tests/benchmarks/slurm/test_slurm.py", "tests/graph_worth/measuring/test_agreement.py")

# A file of slow tests alone, which `make test` does not import: Lightning takes five seconds in each process.
SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)

num_modules_frozen = 0


LONGEST = "test_every_model.py::test_all_variants"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file together: pytest 9.2 ignores how pytest-xdist 3.8 marks a group."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file in IN_ONE_PROCESS else nodeid

    return Files(config, log)


def pytest_runtest_setup():
    """Freeze imported modules: a run collects garbage around its window, and scanning them takes 0.5 s each time."""
    global num_modules_frozen
    if len(sys.modules) > num_modules_frozen + 100:
        gc.collect()
        gc.freeze()
        num_modules_frozen = len(sys.modules)


def pytest_ignore_collect(collection_path, config):
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and "not slow" in config.getoption("markexpr"):
        return bool(SLOW_FILE.search(collection_path.read_text())) or None
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("dist", "no") == "loadgroup":
        # The longest begin first: at the end one process would work on them, and the others wait.
        items.sort(key=lambda item: LONGEST not in item.nodeid)
    lacking = {"gpu": _no_gpu, "slurm": _no_slurm}
    for marker, find_reason in lacking.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = find_reason() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu():
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        if answer.stdout.startswith("GPU"):
            return None
    return "nvidia-smi -L lists no GPU"


def _no_slurm():
    # The tests start a cluster of their own; Debian keeps its daemons where a plain user's PATH does not look.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name, path=path)]
    return f"no {missing[0]} here (Debian: apt install slurm-wlm munge)" if missing else None
