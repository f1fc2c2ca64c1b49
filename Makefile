# The two commands a newcomer needs.  PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
EXTRAS ?= cuda,rocm,tune,cluster,plot,dev
BIN := $(VENV)/bin

.PHONY: run test test-torch setup lint clean

run: setup
	$(BIN)/python scripts/first_run.py

test: setup
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# the suite's own interpreter has no PyTorch, which is gigabytes; here it is installed, and stays
test-torch: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[torch]'
	$(BIN)/python -m pytest -q tests/torch tests/benchmarks/test_torch_overhead.py

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
