"""Train every variant of every model with two sources on this machine, and compare losses and state bit for bit.

python .ci/same_bits.py REVISION [--models gpt3,examples.minimal] [--preset tiny] [--steps 20] [--ranks 1]

The source before is the git revision REVISION, the source after is the working tree. Each variant trains in a process
of its own (`--parity`: deterministic kernels, a hash of all training state after each step). Status 1 where losses,
hashes, graphs or replays differ, and where a variant fails. Bits depend on the processor, so no file of numbers can
stand for the source before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARED = ("status", "losses", "grad_norms", "state_hashes", "num_tensors", "graphs", "replays")
AT_ONCE = 2


def main():
    """Compare the two sources and exit with 1 where they differ."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, args.revision], cwd=ROOT, check=True)
        try:
            differing = compare(args, before, pool)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    sys.exit(1 if differing else 0)


def parse():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="git revision of the source before")
    parser.add_argument("--models", default="", help="as in gpt3,examples.minimal (all)")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each training, with torchrun")
    args = parser.parse_args()
    args.models = args.models.split(",") if args.models else models()
    return args


def models():
    """Names of the packages that have a training script."""
    scripts = sorted([*ROOT.glob("*/train.py"), *ROOT.glob("examples/*/train.py")])
    return [".".join(script.relative_to(ROOT).parent.parts) for script in scripts]


def compare(args, before, pool):
    """Print a line for each variant. Return the names of those that differ."""
    differing = []
    for model in args.models:
        old, new = pool.map(lambda source, model=model: runs_of(source, model, args.preset), (before, ROOT))
        for name in sorted(old.keys() - new.keys()):
            print(f"{model} {name}: not in the source after", flush=True)
        for name in sorted(new.keys() - old.keys()):
            print(f"{model} {name}: not in the source before", flush=True)
        common = [name for name in new if name in old]
        results = pool.map(lambda run: train(*run, args), [run for name in common for run in (old[name], new[name])])
        for name in common:
            text = difference(next(results), next(results))
            if not text.startswith("equal"):
                differing.append(f"{model} {name}")
            print(f"{model} {name}: {text}", flush=True)
    print(f"{len(differing)} differ" + "".join(f"\n    {name}" for name in differing))
    return differing


def runs_of(source, model, preset):
    """Variant and build -> (source, command) of a training, as --describe tells them."""
    script = [sys.executable, "-m", f"{model}.train"]
    told = subprocess.run([*script, "--describe"], cwd=source, capture_output=True, text=True)
    if told.returncode:
        return {}
    told = json.loads(told.stdout)
    if preset not in told["presets"]:
        return {}
    runs = {}
    for name in told["variants"]:
        for build in told.get("variant_builds", {}).get(name, [""]):
            fields = told.get("builds", {}).get(build, {})
            flags = [word for key, value in fields.items() for word in (f"--{key.replace('_', '-')}", str(value))]
            command = ["-m", f"{model}.train", "--preset", preset, "--variant", name, *flags]
            runs[f"{name} {build}".strip()] = (source, command)
    return runs


def train(source, command, args):
    """Train one variant. Returns what --record writes, or the last line of the errors as its status."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        python = [sys.executable]
        if args.ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        words = [*python, *command, "--parity", "--steps", str(args.steps), "--record", str(record)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True)
        if not record.exists():
            lines = done.stderr.strip().splitlines() or [""]
            return {"status": f"exit status {done.returncode}: {lines[-1]}"}
        return json.loads(record.read_text())


def difference(before, after):
    """How two trainings differ, in words that begin with "equal" where they do not."""
    for key in COMPARED:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            step = next(index for index in range(len(old)) if old[index] != new[index])
            return f"{key} differ from step {step} on: {old[step]}, now {new[step]}"
        return f"{key} {str(old)[:100]}, now {str(new)[:100]}"
    if after["status"] not in ("pass", "unsupported") and not after["status"].startswith("exit status 2: "):
        return f"failed with both sources: {after['status']} ({after.get('message', '')[:100]})"
    if not after.get("state_hashes"):
        return f"equal, but did not train: {after['status']} ({after.get('message', '')[:100]})"
    return f"equal, {len(after['losses'])} losses"


if __name__ == "__main__":
    main()
