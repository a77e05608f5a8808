# One virtual environment that holds both sides. `make demo` and `make test` set up all they need.
PYTHON ?= python3.11
VENV   ?= .venv
STAMP  := $(shell date +%Y%m%d-%H%M%S)
OUT    ?= out/$@-$(STAMP)
OLDER_VLLM := 0.30.0 0.31.0
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format wheels isolation smoke bench clean

help:            ## List the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/.ready ## Create the virtual environment

$(VENV)/.ready: scripts/setup_env.sh requirements/*.txt pyproject.toml shared-schema/pyproject.toml packages/*/pyproject.toml
	PYTHON=$(PYTHON) bash scripts/setup_env.sh $(VENV)

demo: setup      ## Capture -> rows -> GRPO steps on a tiny model (OUT=dir, FLAVOUR=images, FOREST_EXECUTION=1)
	$(BIN)/python examples/toolbox/run.py --out $(OUT) $(if $(FLAVOUR),--flavour $(FLAVOUR)) \
	  $(if $(filter-out 0,$(FOREST_EXECUTION)),--forest-execution)

test: setup      ## Run the tests
	$(BIN)/python -m pytest

test-slow: setup ## Run the tests that take minutes each
	$(BIN)/python -m pytest -m slow

lint: setup      ## Style, types, import boundaries, requirement ids
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_requirements.py

format: setup    ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: setup    ## Build the three wheels into dist/
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist shared-schema
	$(BIN)/python -m build --wheel --no-isolation --outdir dist packages/vllm-forest-renderer
	$(BIN)/python -m build --wheel --no-isolation --outdir dist packages/megatron-forest-trainer

isolation: wheels ## Install each wheel without the other side and check what it registers
	PYTHON=$(PYTHON) bash scripts/check_isolation.sh dist

smoke: wheels    ## Run the smoke tests of both sides on older supported vLLMs, from the built wheels
	PYTHON=$(PYTHON) bash scripts/check_vllm_versions.sh dist $(OLDER_VLLM)

bench: $(VENV)/.bench ## Run the benchmarks (OUT=dir keeps the figures there, ARGS=--write updates the docs)
	$(BIN)/python -m benchmarks.run --out $(OUT) $(ARGS)

$(VENV)/.bench: $(VENV)/.ready requirements/bench-peers.txt
	$(BIN)/python -m pip install --no-deps -r requirements/bench-peers.txt
	touch $@

clean:           ## Remove what the targets made
	rm -rf $(VENV) out dist .cache
