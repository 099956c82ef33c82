# `make demo` and `make test` are all that most people need; both set up .venv first if it is missing.
.PHONY: help venv demo reproduce test report bench bench-full lint test-stock clean

VENV := .venv
BIN := $(VENV)/bin
# Two test processes on two cores, each with one thread: more threads than cores slow torch down many times over.
WORKERS ?= 2
NORMS ?=
ARGS ?=
ROW ?=
GPUS ?=
SEEDS ?=

help:
	@echo "make demo [NORMS=power,layer]  train and score small models with every norm (about 20 minutes on 2 cores)"
	@echo "make reproduce ROW=iwslt14_de_en/power [GPUS=8] [SEEDS='1 2 3'] [ARGS=--dry-run]"
	@echo "                               a row of a published table, from raw text to its number (GPUs, hours to days)"
	@echo "make test [ARGS='-k power']    run the tests (under 15 minutes on 2 cores)"
	@echo "make report                    results/: tables and figures from the records of all runs"
	@echo "make bench [ARGS='--only step']"
	@echo "                               how fast norms, training, decoding and start-up are (under 10 minutes on 2 idle cores)"
	@echo "make bench-full                the same with more shapes, settings and rounds (up to three hours)"
	@echo "make lint                      ruff format, ruff check, mypy"
	@echo "make test-stock                the tests on stock fairseq 0.12.2 with Python 3.8 or 3.10 (slow)"
	@echo "make venv                      only set up $(VENV)"
	@echo "make clean                     remove build products and caches; keeps $(VENV) and runs/"

venv:
	@scripts/setup-venv.sh $(VENV)

demo: venv
	$(BIN)/powernorm_fairseq demo $(if $(NORMS),--norms $(NORMS)) $(ARGS)

reproduce: venv
	@test -n "$(ROW)" || { echo "which row? make reproduce ROW=iwslt14_de_en/power"; exit 2; }
	GPUS="$(GPUS)" SEEDS="$(SEEDS)" PYTHON="$(BIN)/python" scripts/reproduce.sh $(ROW) $(ARGS)

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

report: venv
	$(BIN)/powernorm_fairseq report $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks $(ARGS)

bench-full: venv
	$(BIN)/python -m benchmarks --full $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-stock:
	scripts/test-stock.sh $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +
