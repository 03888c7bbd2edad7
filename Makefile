# Each target sets up what it needs in .venv, once. PYTHON=python3 uses that interpreter as it is instead.

models = $(sort $(patsubst %/train.py,%,$(filter-out tests/%,$(wildcard */train.py */*/train.py))))

# Values of the command line are passed as make_MODEL and so on in the environment of benchmarks/from_make.py, which
# makes a flag of each; the program refuses a flag that it does not take. Neither make nor a shell expands a value. What
# a shell exports, such as OUT, does not count, but for PYTHON.
MAKEOVERRIDES =
$(foreach name,$(filter make_%,$(.VARIABLES)),$(eval unexport $(name)))
$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))), \
    $(eval export make_$(name) := $$(value $(name)))$(eval unexport $(name))))
export make_PYTHON := $(if $(filter command environment,$(origin PYTHON)),$(strip $(value PYTHON)))
unexport PYTHON

python = "$${make_PYTHON:-.venv/bin/python}"
setup = @$(if $(make_PYTHON),:,./setup.sh)
from_make = @$(python) -m benchmarks.from_make

.PHONY: help bench measure census epochs doctor host watch publish judge sweep compare frame plots readme submit test test-slow long lint format te clean
.NOTPARALLEL:

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ' *(:[^#]*)?## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *## ' '/^# [A-Z_]+ +## / { printf "  %-11s %s\n", substr($$1, 3), $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "models: $(models)"

# MODEL      ## bench, sweep, submit, compare: folder, as in MODEL=gpt3; bench, census, submit: a,b; bench: all
# PRESET     ## bench, census, sweep, submit: tiny, bench, or another of the model's (bench on a GPU, else tiny)
# VARIANTS   ## bench, measure, submit: some of the model's, as in VARIANTS=eager,graph_step, or all (the headline ones)
# CYCLES     ## bench, measure, census, sweep, submit: number of cycles (8; tiny, light points: 3; census: 4), or auto
# MINUTES    ## bench, measure, submit: go on with cycles so long; census, epochs, sweep, submit with OVER: start nothing late
# NGPU       ## bench, measure, doctor, sweep, submit: number of GPUs, or of ranks on the CPU (1)
# HOST_LOAD  ## bench, measure, submit: busy processes in every second cycle (0); host: their number (cores)
# OUT        ## bench, measure, census, epochs, sweep, submit: root of the runs (runs); compare, frame, plots: what is read (results)
# LABEL      ## bench: ends the name of the runs' folder (made of the flags after --)
# STEP       ## measure, doctor, sweep: your own training step, as in STEP=my_step.py:build (docs/your_step.md)
# RUN        ## publish, judge: a run file
# TABLE      ## frame: points (a row a run, build, variant and number of busy processes), rows, archive, faults
# TO         ## frame: the file, of csv or parquet, as in TO=rows.csv (runs/frame.csv)
# BASE       ## compare: earlier results; fails where OUT has changed from them, up or down
# OVER       ## sweep, submit: the quantity that varies, as in OVER=batch; the model says which it has; of STEP a word
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
# PYTHON     ## all: use this interpreter as it is, without any set-up; measure, doctor: the step runs in it, all else in .venv

bench: ## measure MODEL, eager against graphs, in two to nine minutes on a GPU
	$(setup) core
	$(from_make) bench

measure: ## measure your own training STEP, eager against graphs, in a few minutes on a GPU
	@./setup.sh core
	@.venv/bin/python -m benchmarks.from_make measure || { status=$$?; [ $$status -ge 3 ] && [ $$status -le 8 ]; }

census: ## eager and one graph of eight workloads in eight minutes: a host more for every row
	$(setup) core
	$(from_make) census

epochs: ## epochs of real programs with a loader, logs and a checkpoint: eager, graphed, compiled
	$(setup) core lightning peft
	$(from_make) epochs

doctor: ## what stands against a graph of your own training STEP, each with file and line
	@./setup.sh core
	@.venv/bin/python -m benchmarks.from_make doctor || { status=$$?; [ $$status -ge 3 ] && [ $$status -le 8 ]; }

host: ## microseconds of this host's operators and graph launches, quiet and beside busy processes, in ten seconds
	$(setup) core
	$(from_make) host

watch: ## what a graph could gain in a script as it is: make watch ARGS="-- python train.py"
	$(setup) core
	$(from_make) watch

publish: ## copy a sealed run file, RUN=runs/..., unchanged into results/
	$(setup) core
	$(from_make) publish

judge: ## what each rule says of a run file, RUN=..., and why it is a headline or not
	$(setup) core
	$(from_make) judge

sweep: ## MODEL or STEP at several VALUES of the quantity OVER: a file, a table, and where the gain ends
	$(setup) core
	$(from_make) sweep

compare: ## tables of all results, of the runs in OUT, or of OUT against BASE
	$(setup) core
	$(from_make) compare

frame: ## a TABLE of all results, or of the runs in OUT, as csv or parquet
	$(setup) core
	$(from_make) frame

plots: ## figures of all results, or of the runs in OUT, into its figures/
	$(setup) core plots
	$(from_make) plots

readme: ## write results/overview.*, the tables in the READMEs and README's figures
	$(setup) core plots
	$(from_make) readme
	$(python) -m benchmarks.plot results

submit: ## run MODEL or its sweep OVER VALUES as a Slurm job, several (MODEL=a,b) as an array, then print the tables
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

long: ## kills and damaged input by the hundred, 500 steps of each model, an hour
	$(setup) core dev plots lightning speech dali parquet peft
	$(from_make) long

lint: ## ruff: rules and format; mypy: types; names of variables; what may import what
	$(setup) core dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) .ci/names.py
	$(python) .ci/rooms.py
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
