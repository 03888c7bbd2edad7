#!/usr/bin/env bash
# Set up .venv with the pinned versions of constraints.txt. make calls it; nothing is done a second time.
#
#     ./setup.sh core              torch, numpy, scipy, pandas and more; Transformer Engine too where nvidia-smi answers
#     ./setup.sh core plots dali   and extras of pyproject.toml
#     ./setup.sh te                Transformer Engine, once more if it could not be installed before
#
# A stamp in .venv/.setup for each name holds a checksum of constraints.txt and pyproject.toml and, for te,
# how it went. Exit status 1 and one line when there is no usable Python, .venv is another user's, or pip fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python=.venv/bin/python
stamps=.venv/.setup
checksum=$(cat constraints.txt pyproject.toml | cksum)

fail() {
    echo "setup: $*" >&2
    exit 1
}

is_current() {
    [ -x "$python" ] && [ -f "$stamps/$1" ] && [ "$(head -n 1 "$stamps/$1")" = "$checksum" ]
}

# A name on PATH is not yet an interpreter: pyenv's shims are there for versions that are not active.
is_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name without_venv=
    for name in python3.12 python3.11 python3.13 python3.14 python3 python; do
        is_python "$name" || continue
        if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
        without_venv=${without_venv:-$name}
    done
    if [ -n "$without_venv" ]; then
        fail "$without_venv cannot make a virtual environment (Debian, Ubuntu: apt install $without_venv-venv)"
    fi
    fail "no Python >= 3.11 found on PATH (python3.12, python3.11, ... python3, python); install one, or set PYTHON"
}

# venv --clear and pip would change what is another user's. root may in a folder: containers see a user's as root.
require_own() {
    if [ -e .venv ] && [ ! -O .venv ]; then
        fail "$PWD/.venv belongs to another user; work in a checkout of your own, or take PYTHON=python3"
    fi
    if [ ! -O . ] && [ "$EUID" -ne 0 ]; then
        fail "$PWD belongs to another user; work in a checkout of your own, or take PYTHON=python3"
    fi
}

make_venv() {
    if is_python "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local base
    base=$(find_python)
    echo "setup: making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv || fail "$base -m venv .venv failed"
}

pip_install() {
    "$python" -m pip --disable-pip-version-check --no-input install --constraint constraints.txt "$@"
}

# The requirements of core or of an extra, one a line.
requirements() {
    "$python" - "$1" <<'PROGRAM'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
groups = {**project["optional-dependencies"]}
groups["core"] = [*project["dependencies"], *groups.pop("suite")]
if sys.argv[1] not in groups:
    sys.exit(f"setup: unknown name {sys.argv[1]!r}, takes some of {', '.join(groups)}")
print("\n".join(groups[sys.argv[1]]))
PROGRAM
}

ensure() {
    if is_current "$1"; then return; fi
    require_own
    make_venv
    mkdir -p "$stamps"
    local list=$stamps/$1.txt note=
    if [ "$1" = core ]; then note="; torch takes some minutes"; fi
    requirements "$1" >"$list"
    echo "setup: installing $1 ($(paste -s -d ' ' "$list")) at the versions of constraints.txt$note"
    pip_install --quiet --requirement "$list" || fail "pip could not install $1; the same command tries again"
    echo "$checksum" >"$stamps/$1"
}

# Its PyTorch part is compiled here, against the installed torch. Headers of cuDNN and NCCL come with torch's
# own wheels; NCCL_EP wants more than they hold and is not used.
build_te() {
    local headers
    headers=$(printf ':%s' "$PWD"/.venv/lib/python3*/site-packages/nvidia/*/include)
    pip_install setuptools wheel packaging ninja pybind11 &&
        PATH=$PWD/.venv/bin:$PATH CPATH=${CPATH:+$CPATH:}${headers#:} NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 \
            pip_install --no-build-isolation --requirement "$stamps/te.txt" &&
        "$python" -c 'import torch, transformer_engine.pytorch'
}

# Never fails: what cannot be built is said and remembered, and the models have a layer without it.
install_te() {
    local outcome=failed
    requirements te >"$stamps/te.txt"
    echo "setup: installing te ($(cat "$stamps/te.txt")), which compiles for some minutes; log: .venv/te.log"
    if build_te >.venv/te.log 2>&1; then outcome=installed; fi
    printf '%s\n%s\n' "$checksum" "$outcome" >"$stamps/te"
}

te_failed() {
    is_current te && [ "$(tail -n 1 "$stamps/te")" = failed ]
}

gpu_answers() {
    case $(nvidia-smi -L 2>/dev/null || true) in
    GPU*) return 0 ;;
    *) return 1 ;;
    esac
}

[ $# -gt 0 ] || fail "takes core and extras of pyproject.toml, as in: ./setup.sh core dev"
for name in "$@"; do
    case $name in
    core)
        ensure core
        if ! is_current te && gpu_answers; then install_te; fi
        if te_failed; then
            echo "setup: no Transformer Engine (.venv/te.log says why), plain PyTorch layers instead; retry: make te"
        fi
        ;;
    te)
        ensure core
        if ! is_current te || te_failed; then install_te; fi
        if te_failed; then fail "Transformer Engine could not be installed, .venv/te.log says why"; fi
        ;;
    *) ensure "$name" ;;
    esac
done
