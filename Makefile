# Each target sets up what it needs in .venv, once. PYTHON=python3 uses that interpreter as it is instead.

python = $(or $(strip $(PYTHON)),.venv/bin/python)
setup = @$(if $(strip $(PYTHON)),:,./setup.sh)
models = $(sort $(patsubst %/train.py,%,$(wildcard */train.py)))

# $(call flag,HOST_LOAD,--host-load) is nothing where HOST_LOAD is empty or not given.
flag = $(if $(strip $($1)),$2 "$(strip $($1))")
bench_flags = $(strip $(call flag,MODEL,--model) $(call flag,PRESET,--preset) $(call flag,VARIANTS,--variants) \
    $(call flag,ROUNDS,--rounds) $(call flag,STEPS,--steps) $(call flag,NGPU,--ngpu) \
    $(call flag,HOST_LOAD,--host-load) $(call flag,MINUTES,--minutes) $(call flag,OUT,--out))
session_flags = $(strip $(call flag,LABEL,--label) $(if $(strip $(CONTROL)),--control) $(if $(strip $(CLOSE)),--close) \
    $(if $(strip $(VERBOSE)),--verbose) $(call flag,SESSION,--session))
table = $(if $(strip $(BASE)),gate,compare)
submit_flags = $(bench_flags) $(strip $(call flag,NODES,--nodes) $(call flag,PARTITION,--partition) \
    $(call flag,ACCOUNT,--account) $(call flag,TIME,--time) $(call flag,IMAGE,--image) $(call flag,MOUNTS,--mounts) \
    $(call flag,OVER,--over) $(call flag,VALUES,--values) $(call flag,VARIANT,--variant) $(call flag,SBATCH,--sbatch))
sweep_flags = $(bench_flags) $(strip $(call flag,OVER,--over) $(call flag,VALUES,--values) \
    $(call flag,VARIANT,--variant))
need = $(if $(strip $($1)),,$(error $1 is missing, as in make $@ $1=$2))

.PHONY: help bench publish sweep compare plots scale readme submit test test-slow lint format te clean
.NOTPARALLEL:

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ' *(:[^#]*)?## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *## ' '/^# [A-Z_]+ +## / { printf "  %-11s %s\n", substr($$1, 3), $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "models: $(models)"

# MODEL      ## bench, sweep, submit, scale: the folder of the model, as in MODEL=gpt3; so are PRESET to OUT
# PRESET     ## bench: tiny, bench, or another of the model's (bench where a GPU is found, else tiny)
# VARIANTS   ## bench: some of the model's, as in VARIANTS=eager,graph (all)
# ROUNDS     ## bench: number of timed rounds, or auto (5; tiny: 2)
# STEPS      ## bench: at least this many timed steps in a run (the preset's)
# NGPU       ## bench: number of GPUs, or of ranks on the CPU (1)
# HOST_LOAD  ## bench: busy processes beside the timed runs (0)
# MINUTES    ## bench: start no round that would end later
# OUT        ## bench: root of the sessions (runs); compare, plots: what is read (results)
# LABEL      ## bench: ends the name of the sessions' folder (made of the flags after --)
# CONTROL    ## bench: =1 runs eager once more beside eager: what two equal programs differ by here
# VERBOSE    ## bench: =1 prints the seconds of each run by phase
# CLOSE      ## bench: =1 packs the open session of this MODEL as it stands, or the one that SESSION names
# SESSION    ## publish: packed sessions; bench with CLOSE=1: name of an open one
# BASE       ## compare: earlier results; fails where OUT has changed from them, up or down
# OVER       ## sweep, submit: what is varied, as in OVER=batch; the model says what it has
# VALUES     ## sweep, submit: just these values, as in VALUES=1,2,4
# VARIANT    ## sweep, submit: what stands against eager (graph)
# NODES      ## submit: nodes of one job, NGPU ranks on each (1; of PRESET=mlperf those of the submission)
# PARTITION  ## submit: of Slurm (its default), and so are ACCOUNT and TIME, as in TIME=2:00:00
# ACCOUNT    ## submit: see PARTITION
# TIME       ## submit: time limit of a job, which is queued again when it is over
# IMAGE      ## submit: container (pyxis), as in IMAGE=nvcr.io#nvidia/pytorch:25.09-py3 (none)
# MOUNTS     ## submit: more mounts for it, as in MOUNTS=/data:/data
# SBATCH     ## submit: further options of sbatch, as in SBATCH="qos=high gres=gpu:h200:8"
# ARGS       ## bench, sweep, compare, plots, readme, submit, test, test-slow: the rest, as in ARGS="-- --layers 4"
# PYTHON     ## all: use this interpreter as it is, without any set-up

bench: ## measure MODEL, eager against graphed
	$(if $(strip $(SESSION)),,$(call need,MODEL,$(firstword $(models)); models: $(models)))
	$(setup) core
	$(python) -m benchmarks.run $(bench_flags) $(session_flags) $(ARGS)

publish: ## copy packed sessions, SESSION=runs/..., unchanged into results/
	$(call need,SESSION,runs/h200x1/gpt3-bench/20261122T031500Z-13f405-c77b)
	$(setup) core
	$(python) -m benchmarks.publish publish $(SESSION)

sweep: ## where graphs stop paying: MODEL at growing values of OVER
	$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(call need,OVER,batch)
	$(setup) core
	$(python) -m benchmarks.sweep $(sweep_flags) $(ARGS)

compare: ## tables of all results, of the records in OUT, or of OUT against BASE
	$(setup) core
	$(python) -m benchmarks.$(table) "$(or $(strip $(OUT)),results)" $(call flag,BASE,--against) $(ARGS)

plots: ## figures of all results, or of the records in OUT, into its figures/
	$(setup) core plots
	$(python) -m benchmarks.plot "$(or $(strip $(OUT)),results)" $(ARGS)

scale: ## what a gain on one GPU becomes on a cluster, simulated from the records of MODEL
	$(call need,MODEL,gpt3)
	$(setup) core plots
	$(python) -m benchmarks.scale "$(or $(strip $(OUT)),results)" $(call flag,MODEL,--model) $(call flag,PRESET,--preset) \
	    $(call flag,VARIANT,--variant) $(ARGS)

readme: ## write results/overview.*, the tables in the READMEs and README's figures from the records
	$(setup) core plots
	$(python) -m benchmarks.overview results --write --readme $(ARGS)
	$(python) -m benchmarks.plot results --readme

submit: ## run MODEL as a Slurm job, several (MODEL=a,b) or VALUES of a sweep as an array, then make the tables
	$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(setup) core
	$(python) -m benchmarks.submit $(submit_flags) $(ARGS)

# Processes of one thread each: two that share two cores would wait for each other. Three for two cores, since many
# tests wait for what they have started. ARGS="-n 0" runs all in one. Bytecode is kept: pytest takes ten seconds to
# rewrite all assertions, and the tests start hundreds of processes.
pytest = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(python) -m pytest
test: ## tests of what runs anywhere, in minutes
	$(setup) core dev plots lightning speech dali
	$(pytest) -n 3 --dist worksteal -m "not slow and not slurm and not gpu" $(ARGS)

test-slow: ## the slow tests, and those with Slurm where sbatch is found
	$(setup) core dev plots lightning speech dali parquet peft
	$(pytest) -n 2 --dist loadfile -m "(slow or slurm) and not gpu" $(ARGS)

lint: ## ruff: rules and format
	$(setup) dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .

format: ## let ruff repair what it can
	$(setup) dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

te: ## install Transformer Engine; tries again where that failed
	$(setup) te

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
