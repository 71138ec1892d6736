# Every target sets up what it needs. Wanted on the machine: python3 (3.11 or newer), make, and a
# package index that pip reaches.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
OUT     ?= out/demo
SITE    ?= out/site

BIN   := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start many processes; each would compile the package's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test test-fast test-all lint loops format demo docs bench bench-plans bench-promises zoo bars gpu-aot picture lock clean

help:
	@echo "make setup      create $(VENV) with the locked packages and this one, editable"
	@echo "make test       lint, type check and the tests, but for the longest"
	@echo "make test-fast  the tests that take about half a second at most, of every stage"
	@echo "make test-all   every test, with the packages that some of them want"
	@echo "make docs       the site of docs/, with the reference from docstrings, into $(SITE)"
	@echo "make demo       the main job: a train step, its front, its plans run (into $(OUT))"
	@echo "make zoo        the fronts of models/, as a table; ZOO=--full at the sizes people run"
	@echo "make bench      the tables of the benchmarks"
	@echo "make bench-promises  peaks and bytes of every program beside XLA's, an hour or more"
	@echo "make bench-plans  every plan of every program run on 8 CPU devices, an hour"
	@echo "make bars       what has been promised, measured again: figure, limit, ok or not"
	@echo "make lint       ruff and mypy alone;  make format  lets ruff rewrite the files"
	@echo "make clean      remove everything that make has made"

setup: $(READY)

# Setuptools warns of every editable install that folders of the package's name shadow it.
$(READY): export PYTHONWARNINGS = ignore

# A lock that does not fit this Python or platform gives way to pyproject's own version ranges.
# Compiling every module of every package takes half of the installation; Python compiles the few
# that are imported.
$(READY): pyproject.toml requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; try: make PYTHON=python3.11 setup" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); $(PYTHON) -m virtualenv $(VENV); } || \
	  { echo "error: $(PYTHON) can make no virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -r requirements-dev.lock || \
	  { echo "the lock does not fit here; installing from pyproject.toml" >&2; \
	    $(BIN)/python -m pip install --quiet --upgrade pip && \
	    $(BIN)/python -m pip install --quiet --editable . --group dev; }
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c "import equinox, flax.nnx, hypothesis, islpy, optax, pytest, tapestry_egg.cli"
	@touch $@

# XLA compiles for CPUs in a fifth of the time with its older fusion emitters, and with modules that
# are not split for threads, because the other cores run tests of their own. Fusions differ, so
# `make test-all` compiles as users do.
test test-fast: export XLA_FLAGS += --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1

# The linter has one processor; the loops that numba compiles have another meanwhile.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 lint loops
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long"

test-fast: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

# Graphviz: what some tests are skipped without; others want a Chromium and Node of the
# distribution.
test-all: $(READY) lint docs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plot,smt]'
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=draws

# Broken links and docstrings that do not read are errors. Nothing in the site loads from elsewhere.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs $(SITE)
	@! grep -rlE '(src|href)="(https?:)?//[^"]*\.(js|css|woff2?)' $(SITE) --include='*.html' || \
	  { echo "error: the pages above load from elsewhere" >&2; exit 1; }

bars: $(READY)
	$(BIN)/python -m benchmarks.bars

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

loops: $(READY)
	@JAX_PLATFORMS=cpu $(BIN)/python -m tests.loops

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(READY)
	$(BIN)/python -m examples.demo $(OUT)

# The picture at the top of the README is the demo's own.
picture: demo
	cp $(OUT)/front.svg docs/front.svg

# Each benchmark prints a table and runs alone: python -m benchmarks.NAME
BENCHES := $(sort $(notdir $(basename $(wildcard benchmarks/bench_*.py))))
FEW     := mlp moe graph_network
bench: $(READY)
	@test -n "$(BENCHES)" || { echo "error: benchmarks/ holds no bench_*.py" >&2; exit 1; }
	@set -e; for name in $(BENCHES); do echo "== $$name"; few=; \
	  case $$name in bench_promises|bench_plans) few="$(FEW)";; esac; $(BIN)/python -m benchmarks.$$name $$few; done

# Every program, not a few.
bench-promises: $(READY)
	$(BIN)/python -m benchmarks.bench_promises

bench-plans: $(READY)
	$(BIN)/python -m benchmarks.bench_plans

zoo: $(READY)
	$(BIN)/python -m benchmarks.zoo $(ZOO)

# Compiling for H100 without a GPU: 180 MB, wanted by some benchmarks, skipped where it is absent.
# The plugin must be of the version of the installed jaxlib.
gpu-aot: $(READY)
	@v=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jaxlib"))') && \
	  $(BIN)/python -m pip install --quiet --no-deps \
	    jax-cuda12-pjrt==$$v jax-cuda12-plugin==$$v

# Needs uv. One file serves every Python and platform, by markers.
lock:
	uv pip compile pyproject.toml --group dev --extra demo --universal --upgrade \
	  --no-annotate --no-header --no-emit-index-url --no-emit-find-links -o requirements-dev.lock

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
