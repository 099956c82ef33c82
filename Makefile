# `make demo` and `make test` are all that most people need; both set up .venv first if it is missing.
.PHONY: help venv demo test report lint test-stock clean

VENV := .venv
BIN := $(VENV)/bin
# Two test processes on two cores, each with one thread: more threads than cores slow torch down many times over.
WORKERS ?= 2
NORMS ?=
ARGS ?=

help:
	@echo "make demo [NORMS=power,layer]  train and score small models with every norm (about 20 minutes on 2 cores)"
	@echo "make test [ARGS='-k power']    run the tests (under 15 minutes on 2 cores)"
	@echo "make report                    results/: tables and figures from the records of all runs"
	@echo "make lint                      ruff format, ruff check, mypy"
	@echo "make test-stock                the tests on stock fairseq 0.12.2 with Python 3.8 or 3.10 (slow)"
	@echo "make venv                      only set up $(VENV)"
	@echo "make clean                     remove build products and caches; keeps $(VENV) and runs/"

venv:
	@scripts/setup-venv.sh $(VENV)

demo: venv
	$(BIN)/powernorm_fairseq demo $(if $(NORMS),--norms $(NORMS)) $(ARGS)

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

report: venv
	$(BIN)/powernorm_fairseq report $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-stock:
	scripts/test-stock.sh $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +
