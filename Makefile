# Every target first makes .venv: the pinned tools of requirements/dev.lock, then the package
# itself, installed as users install it (not editable) and again whenever a source file changes.
# The environment belongs to this file; do not keep anything else in it.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
TOOLS := $(VENV)/tools.stamp
PACKAGE := $(VENV)/package.stamp
TORCH := $(VENV)/torch.stamp
# verl, which `make check` tests in each of these versions, lies beside the environment's packages:
# its dependencies, which would hold others back, are on the path of its own tests only.
VERL_VERSIONS := 0.9.0 0.9.1
VERL := $(VENV)/verl.stamp
VERL_TESTS := $(patsubst %,tests/integrations/test_verl_%.py,real driver losses)
# Directories are listed too, so that deleting a module reinstalls.
SOURCES := $(shell find src -name __pycache__ -prune -o -name '.*' -prune -o -print)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-plan test check lint bench lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: demo-plan  ## plan an example window and show what it saves

demo-plan: $(PACKAGE)
	@$(BIN)/python examples/demo_plan.py

# Two test workers would compile the same kernels twice.
KERNELS := $(BIN)/python -c 'import routepack.planner, routepack.counting'

test: $(TORCH) $(PACKAGE)  ## run the tests, without the slow ones
	@$(KERNELS)
	$(BIN)/pytest -n $(WORKERS) --benchmark-disable -m "not slow"

# Tests of a file share what its processes found, so a file stays on one worker.
check: $(TORCH) $(VERL) $(PACKAGE)  ## run the slow tests, also with verl, and fuzz for longer
	@$(KERNELS)
	@set -e; for version in $(VERL_VERSIONS); do \
	  echo "testing with verl $$version"; \
	  PYTHONPATH=$(CURDIR)/$(VENV)/verl-$$version:$(CURDIR)/$(VENV)/verl ROUTEPACK_TEST_VERL=$$version \
	  timeout 900 $(BIN)/pytest -n $(WORKERS) --dist loadfile --benchmark-disable $(VERL_TESTS); \
	done
	HYPOTHESIS_PROFILE=check $(BIN)/pytest -n $(WORKERS) --benchmark-disable -m "slow or hypothesis"

lint: $(PACKAGE)  ## check style, format, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-logo

bench: $(PACKAGE)  ## run the benchmarks and write bench/results.md
	$(BIN)/python -m bench.report

lock:  ## renew requirements/dev.lock from requirements/dev.in
	@echo "resolving requirements/dev.in"
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && \
	$(PYTHON) -m venv "$$new" && \
	"$$new/bin/python" -m pip -qq --disable-pip-version-check --no-input install -r requirements/dev.in && \
	{ echo "# Made by \`make lock\` from requirements/dev.in; do not edit." && \
	  "$$new/bin/python" -m pip freeze --exclude routepack; } > "$$new/dev.lock" && \
	cp "$$new/dev.lock" requirements/dev.lock

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(TOOLS): requirements/dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	{ echo "routepack needs Python 3.11 or later, which $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing the pinned tools into $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --no-deps -r requirements/dev.lock
	@touch $@

# Only tests need it: the package does without.
$(TORCH): $(TOOLS) requirements/torch.lock
	@echo "installing PyTorch into $(VENV)"
	@$(PIP) install --no-deps -r requirements/torch.lock
	@touch $@

# Fails where a download does, rather than leaving tests out.
$(VERL): $(TOOLS) requirements/verl.lock
	@echo "installing verl $(VERL_VERSIONS) into $(VENV)"
	@rm -rf $(VENV)/verl $(VERL_VERSIONS:%=$(VENV)/verl-%)
	@timeout 900 $(PIP) install --no-deps --target $(VENV)/verl -r requirements/verl.lock && \
	for version in $(VERL_VERSIONS); do \
	  timeout 300 $(PIP) install --no-deps --target $(VENV)/verl-$$version verl==$$version || exit 1; \
	done || { echo "verl could not be installed, so make check cannot test with it" >&2; exit 1; }
	@touch $@

# The old copy goes first, compiled kernels included: numba does not notice a change in a kernel
# that another file's kernel calls.
$(PACKAGE): $(TOOLS) pyproject.toml $(SOURCES)
	@echo "installing routepack into $(VENV)"
	@rm -rf $(VENV)/lib/python3*/site-packages/routepack
	@$(PIP) install --force-reinstall --no-deps --no-build-isolation .
	@$(BIN)/python -m pip --disable-pip-version-check check > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log >&2; exit 1; }
	@touch $@
