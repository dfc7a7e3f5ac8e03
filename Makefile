# The two commands that matter: `make demo` and `make test`. Everything is installed into .venv by pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS ?= 2
CASES ?= 20000
SEED ?= 1

.PHONY: help demo test surfaces thorough ecosystem fuzz lowest lint format bench gpu-proof docs pictures clean
.DEFAULT_GOAL := help

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/'

# pip >= 25.1 understands dependency groups.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml constraints.txt
	@echo "Installing Traceloom and PyTorch into $(VENV) ..."
	$(PIP) install --constraint constraints.txt --editable . torch
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install --constraint constraints.txt --group test
	@touch $@

$(VENV)/.ecosystem: $(VENV)/.test
	$(PIP) install --constraint constraints.txt --group ecosystem
	@touch $@

# All of it by one call of pip, which resolves once; bytecode is then compiled on all cores.
$(VENV)/.all: $(VENV)/.pip pyproject.toml constraints.txt
	$(PIP) install --no-compile --constraint constraints.txt --editable . torch \
	    --group test --group ecosystem --group lint --group docs
	-$(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib
	@touch $(VENV)/.demo $(VENV)/.test $(VENV)/.ecosystem $(VENV)/.lint $(VENV)/.docs $@

$(VENV)/.lint: $(VENV)/.pip pyproject.toml
	$(PIP) install --editable . --group lint
	@touch $@

$(VENV)/.docs: $(VENV)/.pip pyproject.toml
	$(PIP) install --editable . --group docs
	@touch $@

demo: $(VENV)/.demo ## Record a small GPT on 2 ranks, report it in the terminal and as demo/report.html
	OMP_NUM_THREADS=1 $(BIN)/traceloom record --force --memory --graph --steps 3..8 -o demo/run -- \
	    $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
	$(BIN)/traceloom report demo/run
	$(BIN)/traceloom report demo/run --force -o demo/report.html
	@echo "For a fleet: $(PIP) install --editable '.[fleet]' && $(BIN)/traceloom serve --demo"

test: $(VENV)/.test ## Run the whole test suite
	$(BIN)/python -m compileall -q src tests/support  # many tests start processes, which may not be allowed to keep bytecode
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

thorough: $(VENV)/.ecosystem ## Also what the suite leaves out: more traces, more examples, crashes at every point
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --thorough

surfaces: $(VENV)/.test ## Compare what users and programs see with tests/surfaces (UPDATE=1: write it anew)
	$(BIN)/python scripts/surfaces --jobs $(JOBS) $(if $(UPDATE),--update)

ecosystem: $(VENV)/.ecosystem ## Install what the tests of programs of the ecosystem need; without it they are skipped

fuzz: $(VENV)/.test ## Try every verb on 20,000 damaged inputs of all formats (CASES=N SEED=S)
	$(BIN)/python scripts/fuzz.py --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

lowest: ## Run the tests that need no PyTorch with the oldest dependencies that are allowed
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip --quiet install --upgrade "pip>=25.1"
	$(PYTHON) scripts/lowest_versions.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip --quiet install --constraint .venv-lowest/constraints.txt --editable . --group test
	.venv-lowest/bin/python -m pytest -n $(JOBS) --dist worksteal tests/unit tests/golden tests/property

lint: $(VENV)/.lint ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test ## Measure reading, analyses, recording, linking and Chakra files, against peers where there are any
	$(BIN)/python benchmarks/read.py
	$(BIN)/python benchmarks/reach.py --job benchmarks/out/job64
	$(BIN)/python benchmarks/analyze.py
	$(BIN)/python benchmarks/analyze.py --job benchmarks/out/job64
	$(BIN)/python benchmarks/record.py
	$(BIN)/python benchmarks/link.py
	$(BIN)/python benchmarks/retime.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/chakra.py
	$(BIN)/python benchmarks/memory.py

gpu-proof: $(VENV)/.test ## Check recordings on this machine's GPUs against independent measurements, in at most ten minutes
	$(BIN)/python scripts/gpu_proof.py

docs: $(VENV)/.docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Wrote site/index.html"

pictures: $(VENV)/.test demo ## Take the pictures of the documentation anew, of the demo run
	PYTHONPATH=tests $(BIN)/python scripts/pictures.py

clean: ## Remove what was made
	rm -rf $(VENV) .venv-lowest demo gpu-proof site build dist .pytest_cache .mypy_cache .ruff_cache
