# The two commands a newcomer needs.  PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
VENV ?= .venv
# two at work, and one in place of those that wait: for a process, a time limit, a lock
JOBS ?= 3
EXTRAS ?= cuda,rocm,tune,cluster,plot,dev
# the CPU's build, 190 MB; TORCH=torch is a GPU's, gigabytes
TORCH ?= torch==2.13.0+cpu
BIN := $(VENV)/bin
# a test that hangs ends its process, and another begins it anew
SUITE := -m pytest -q -n $(JOBS) --max-worker-restart 2 --dist loadfile --no-loadscope-reorder

.PHONY: run test suite test-torch setup lint clean

run: setup
	$(BIN)/python scripts/first_run.py

test: suite test-torch

suite: setup
	$(BIN)/python $(SUITE)

# in a folder beside the environment: where PyTorch is installed, every process imports it with TVM
test-torch: $(VENV)/torch/.installed
	@if test ! -e $<; then echo "pip finds no $(TORCH): its tests are left out; see CONTRIBUTING.md"; exit; fi; \
	set -x; PYTHONPATH="$(abspath $(<D))$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python $(SUITE) \
	  $$(grep -rl --include='*.py' 'importorskip("torch"' tests)

$(VENV)/torch/.installed: | setup
	pip="$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade --target $(@D) $(TORCH)"; \
	if $$pip; then touch $@; fi

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else f"Python {v[0]}.{v[1]} was not tried; run: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf out build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
