# Every target works from a fresh checkout with Python 3.11, make and the package registries.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := .cache/tools/.ready
SOURCES := export model_repo service benchmarks examples scripts tests
PYTEST_ARGS ?=
SOAK_S ?= 300

.PHONY: help setup serve test check fmt unit e2e soak bench lock clean
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(READY) $(TOOLS) ## Create .venv from the lock file and fetch the pinned command line tools

$(READY): requirements/lock.txt pyproject.toml
	@$(PYTHON) scripts/check_python.py
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "setup: installing $$(grep -c == requirements/lock.txt) pinned packages"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --progress-bar on -r requirements/lock.txt | { grep --line-buffered '^Collecting' || true; }
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	@$(BIN)/python scripts/check_lock.py requirements/lock.txt
	@touch $(READY)

$(TOOLS): scripts/tools.py | $(READY)
	@$(BIN)/python scripts/tools.py
	@mkdir -p $(dir $(TOOLS)) && touch $(TOOLS)

serve: $(READY) ## Train and export the sample, start Triton and the front tier, do one lookup, stay in the foreground
	@$(BIN)/python -m examples.sample
	@exec $(BIN)/python -m examples.serve

test: setup check unit e2e ## Set-up, linters, types, unit tests and end-to-end tests against the real Triton

check: $(READY) ## Linters and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

fmt: $(READY) ## Format and mend what the linter can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

unit: setup
	$(BIN)/pytest -m "not e2e and not slow and not gpu" $(PYTEST_ARGS)

e2e: setup
	$(BIN)/pytest -m "e2e and not slow and not gpu" $(PYTEST_ARGS)

soak: setup ## Load under kills against the real stack, for SOAK_S seconds
	KJTSERVE_SOAK_S=$(SOAK_S) $(BIN)/pytest -s -m slow $(PYTEST_ARGS)

bench: $(READY) ## Measure, side by side with what people use today
	$(BIN)/kjtserve bench

lock: $(READY) ## Write requirements/lock.txt from what is installed in .venv
	@sed -n '/^#/p' requirements/lock.txt > requirements/lock.new
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' >> requirements/lock.new
	@mv requirements/lock.new requirements/lock.txt

clean: ## Remove everything that was built
	rm -rf $(VENV) .cache build-output dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
