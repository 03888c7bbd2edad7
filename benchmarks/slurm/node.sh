#!/usr/bin/env bash
# One node's part of a run: srun starts this on every node with a command of benchmarks.run behind it.
#
# Node 0 is the node of the batch script, which Slurm runs on the first node of a job; torchrun gives it rank 0, as it
# has to be: rank 0 talks to benchmarks.run through a socket of that machine (graph_worth/harness/processes/launch.py asks for it first).
#
# NODE_PYTHON takes the place of that command's interpreter, for a container whose Python is another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# torchrun's --node-rank.
export PET_NODE_RANK=${SLURM_NODEID:?is set by srun: start this through srun}
python=${1:?needs a command: PYTHON ARGUMENTS...}
shift
exec "${NODE_PYTHON:-$python}" "$@"
