#!/usr/bin/env bash
# One node's part of a run: srun starts this on every node with the command of benchmarks.run behind it.
#
# NODE_PYTHON takes the place of that command's interpreter, for a container whose Python is another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# torchrun's --node-rank.
export PET_NODE_RANK=${SLURM_NODEID:?is set by srun: start this through srun}
python=${1:?needs a command: PYTHON ARGUMENTS...}
shift
exec "${NODE_PYTHON:-$python}" "$@"
