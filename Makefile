# Each target sets up what it needs in .venv, once. PYTHON=python3 uses that interpreter as it is instead.

python = $(or $(strip $(PYTHON)),.venv/bin/python)
setup = @$(if $(strip $(PYTHON)),:,./setup.sh)
models = $(sort $(patsubst %/train.py,%,$(wildcard */train.py)))

# $(call flag,HOST_LOAD,--host-load) is nothing where HOST_LOAD is empty or not given.
flag = $(if $(strip $($1)),$2 "$(strip $($1))")
bench_flags = $(strip $(call flag,MODEL,--model) $(call flag,PRESET,--preset) $(call flag,VARIANTS,--variants) \
    $(call flag,ROUNDS,--rounds) $(call flag,STEPS,--steps) $(call flag,NGPU,--ngpu) \
    $(call flag,HOST_LOAD,--host-load) $(call flag,MINUTES,--minutes) $(call flag,OUT,--out))
need = $(if $(strip $($1)),,$(error $1 is missing, as in make $@ $1=$2))

.PHONY: help bench compare test test-slow lint format te clean
.NOTPARALLEL:

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ' *(:[^#]*)?## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@awk -F ' *## ' '/^# [A-Z_]+ +## / { printf "  %-11s %s\n", substr($$1, 3), $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "models: $(models)"

# MODEL      ## bench: the folder of the model, as in MODEL=gpt3
# PRESET     ## bench: tiny, bench, or another of the model's (bench where a GPU is found, else tiny)
# VARIANTS   ## bench: some of the model's, as in VARIANTS=eager,graph (all)
# ROUNDS     ## bench: number of timed rounds, or auto (5; tiny: 2)
# STEPS      ## bench: at least this many timed steps in a run (the preset's)
# NGPU       ## bench: number of GPUs, or of ranks on the CPU (1)
# HOST_LOAD  ## bench: busy processes beside the timed runs (0)
# MINUTES    ## bench: start no round that would end later
# OUT        ## bench, compare: folder of the records (runs/...)
# ARGS       ## bench, compare, test, test-slow: further arguments, as in ARGS="-- --layers 4"
# PYTHON     ## all: use this interpreter as it is, without any set-up

bench: ## measure MODEL, eager against graphed
	$(call need,MODEL,$(firstword $(models)); models: $(models))
	$(setup) core
	$(python) -m benchmarks.run $(bench_flags) $(ARGS)

compare: ## print the table of the records in OUT
	$(call need,OUT,runs/...; a folder of records)
	$(setup) core
	$(python) -m benchmarks.compare "$(strip $(OUT))" $(ARGS)

test: ## tests of what runs anywhere, in minutes
	$(setup) core dev
	$(python) -m pytest -m "not slow and not slurm and not gpu" $(ARGS)

test-slow: ## the slow tests, and those with Slurm where sbatch is found
	$(setup) core dev
	$(python) -m pytest -m "(slow or slurm) and not gpu" $(ARGS)

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
