# Each target sets up what it needs in .venv, once. PYTHON=python3 uses that interpreter as it is instead.

variables = MODEL PRESET VARIANTS CYCLES MINUTES NGPU HOST_LOAD OUT LABEL CONTROL RUN BASE OVER VALUES VARIANT STEP \
    NODES PARTITION ACCOUNT TIME IMAGE MOUNTS SBATCH ROUNDS STEPS SESSION CLOSE VERBOSE ARGS
models = $(sort $(patsubst %/train.py,%,$(wildcard */train.py)))

# Values of the command line are passed as make_MODEL and so on in the environment of benchmarks/from_make.py, which
# makes the command of them. Neither make nor a shell expands them. What a shell exports, such as OUT, does not count.
MAKEOVERRIDES =
is_given = $(filter command,$(origin $1))
pass = $(if $2,$(eval export make_$1 := $$(value $1))$(eval unexport $1),$(eval unexport make_$1)$(eval make_$1 :=))
$(foreach name,$(variables),$(call pass,$(name),$(call is_given,$(name))))
# Of PYTHON alone it does.
$(call pass,PYTHON,$(filter command environment,$(origin PYTHON)))
make_PYTHON := $(strip $(make_PYTHON))

python = "$${make_PYTHON:-.venv/bin/python}"
setup = @$(if $(strip $(make_PYTHON)),:,./setup.sh)
from_make = @$(python) -m benchmarks.from_make

bench_takes = MODEL PRESET VARIANTS CYCLES MINUTES NGPU HOST_LOAD OUT LABEL CONTROL ARGS
measure_takes = STEP VARIANTS CYCLES MINUTES NGPU HOST_LOAD OUT ARGS
census_takes = MODEL PRESET CYCLES MINUTES OUT ARGS
doctor_takes = STEP MODEL PRESET NGPU ARGS
publish_takes = RUN ARGS
sweep_takes = MODEL PRESET CYCLES MINUTES NGPU HOST_LOAD OUT OVER VALUES VARIANT ARGS
submit_takes = $(sweep_takes) VARIANTS NODES PARTITION ACCOUNT TIME IMAGE MOUNTS SBATCH
compare_takes = OUT BASE ARGS
plots_takes = OUT ARGS
readme_takes = ARGS
# make bench NODES=2 is refused, and its reader told that make submit takes NODES.
space = $(subst x,,x x)
targets_with = $(strip $(foreach target,bench measure census publish sweep submit compare plots,$(if \
    $(filter $1,$($(target)_takes)),$(target))))
or_nobody = $(if $(targets_with),make $(subst $(space), or make ,$(targets_with)) does,no target does any more)
check = $(foreach name,$(filter-out $($@_takes),$(variables)),$(if \
    $(strip $(make_$(name))),$(error make $@ takes no $(name), $(call or_nobody,$(name)))))
need = $(if $(strip $(make_$1)),,$(error $1 is missing, as in make $@ $1=$2))

.PHONY: help bench measure census doctor publish sweep compare plots readme submit test test-slow long lint format te clean
.NOTPARALLEL:

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ' *(:[^#]*)?## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *## ' '/^# [A-Z_]+ +## / { printf "  %-11s %s\n", substr($$1, 3), $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "models: $(models)"

# MODEL      ## bench, sweep, submit, doctor: the folder of the model, as in MODEL=gpt3; bench, submit: a,b; bench: all
# PRESET     ## bench, sweep, submit, doctor: tiny, bench, or another of the model's (bench where there is a GPU, else tiny)
# VARIANTS   ## bench, submit: some of the model's, as in VARIANTS=eager,graph_step, or all (the headline ones)
# CYCLES     ## bench, sweep, submit: number of cycles, or auto: until +-0.5 % (8; tiny: 3)
# MINUTES    ## bench, submit: go on with cycles for so many; sweep, submit with OVER: start no point that would end later
# NGPU       ## bench, measure, doctor, sweep, submit: number of GPUs, or of ranks on the CPU (1)
# HOST_LOAD  ## bench, sweep, submit: busy processes in every second cycle (0)
# OUT        ## bench, sweep, submit: root of what is measured (runs); compare, plots: what is read (results)
# LABEL      ## bench: ends the name of the runs' folder (made of the flags after --)
# CONTROL    ## bench: =0 leaves out the control, the base once more as if it were a variant
# STEP       ## measure, doctor: your own training step, as in STEP=my_step.py:build (docs/your_step.md)
# RUN        ## publish: a run file
# BASE       ## compare: earlier results; fails where OUT has changed from them, up or down
# OVER       ## sweep, submit: the quantity that varies, as in OVER=batch; the model says which it has
# VALUES     ## sweep, submit: values of OVER, as in VALUES=1,2,4
# VARIANT    ## sweep, submit: what stands against eager (the model's first graph)
# NODES      ## submit: nodes of one job, NGPU ranks on each (1; of PRESET=mlperf those of the submission)
# PARTITION  ## submit: of Slurm (its default), and so are ACCOUNT and TIME, as in TIME=2:00:00
# ACCOUNT    ## submit: see PARTITION
# TIME       ## submit: time limit of a job, which is queued again when it is over
# IMAGE      ## submit: container (pyxis), as in IMAGE=nvcr.io#nvidia/pytorch:25.09-py3 (none)
# MOUNTS     ## submit: more mounts for it, as in MOUNTS=/data:/data
# SBATCH     ## submit: further options of sbatch, as in SBATCH="qos=high gres=gpu:h200:8"
# ARGS       ## all of these, test, test-slow, long: further words, as in ARGS="-- --layers 4"
# PYTHON     ## all: use this interpreter as it is, without any set-up; measure, doctor: the step runs in it

bench: ## measure MODEL, eager against graphs, in two to seven minutes on a GPU
	$(check)$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(setup) core
	$(from_make) bench

measure: ## measure your own training STEP, eager against graphs, in two minutes on a GPU
	$(check)$(call need,STEP,my_step.py:build)
	@./setup.sh core
	@.venv/bin/python -m benchmarks.from_make measure || { status=$$?; [ $$status -ge 3 ] && [ $$status -le 8 ]; }

census: ## eager and one graph of eight workloads in eight minutes: a host more for every row
	$(check)
	$(setup) core
	$(from_make) census

doctor: ## what stands against a graph of your own training STEP, or of MODEL's, each with file and line
	$(check)$(if $(strip $(make_MODEL)),,$(call need,STEP,my_step.py:build))
	@./setup.sh core
	@.venv/bin/python -m benchmarks.from_make doctor || { status=$$?; [ $$status -ge 3 ] && [ $$status -le 8 ]; }

publish: ## copy a sealed run file, RUN=runs/..., unchanged into results/
	$(check)$(call need,RUN,runs/h200x1/gpt3-bench/20261125T101500Z-a7d396.json)
	$(setup) core
	$(from_make) publish

sweep: ## MODEL at several VALUES of the quantity OVER, and a table of all
	$(check)$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(call need,OVER,batch)
	$(setup) core
	$(from_make) sweep

compare: ## tables of all results, of the runs in OUT, or of OUT against BASE
	$(check)
	$(setup) core
	$(from_make) $(if $(strip $(make_BASE)),gate,compare)

plots: ## figures of all results, or of the runs in OUT, into its figures/
	$(check)
	$(setup) core plots
	$(from_make) plots

readme: ## write results/overview.*, the tables in the READMEs and README's figures
	$(check)
	$(setup) core plots
	$(from_make) readme
	$(python) -m benchmarks.plot results

submit: ## run MODEL as a Slurm job, several (MODEL=a,b) or VALUES of a sweep as an array, then print the tables
	$(check)$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(setup) core
	$(from_make) submit

# Processes of one thread each: two that share two cores would wait for each other. Three for two cores, since many
# tests wait for what they have started. ARGS="-n 0" runs all in one. Bytecode is kept: pytest takes ten seconds to
# rewrite all assertions, and the tests start hundreds of processes.
test test-slow long: export OMP_NUM_THREADS = 1
test test-slow long: export PYTHONDONTWRITEBYTECODE =
test: ## tests of what runs anywhere, in minutes
	$(setup) core dev plots lightning speech dali parquet
	$(from_make) test

test-slow: ## the slow tests, and those with Slurm where sbatch is found
	$(setup) core dev plots lightning speech dali parquet peft
	$(from_make) test-slow

long: ## kills and damaged input by the hundred, half an hour
	$(setup) core dev plots lightning speech dali parquet peft
	$(from_make) long

lint: ## ruff: rules and format; mypy: types; import-linter: what may import what
	$(setup) core dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) -c "from importlinter.cli import lint_imports_command as main; main()" --no-logo --no-cache

format: ## let ruff repair what it can
	$(setup) dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

te: ## install Transformer Engine; tries again where that failed
	$(setup) te

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
