# `make run` trains, `make test` checks everything, `make help` lists the rest. Each
# first builds its own environment in .venv when that is missing or the lock changed.

.DEFAULT_GOAL := help
.PHONY: help run test lint bench env lock build-files clean

# The interpreters to build .venv with, in order of preference: the first 3.11 wins.
PYTHON ?= python3.11 python3 python
# Passed on to `make run`, pytest and the resolver of `make lock`.
RUN_FLAGS ?=
PYTEST_FLAGS ?=
LOCK_FLAGS ?=
# `make test SLOW=1` runs the tests marked `slow` too.
SLOW ?=
# Processes of pytest: one a core, as long as each has 6 GiB of memory for TensorFlow.
WORKERS ?= $(shell \
	cores=$$(nproc 2>/dev/null || echo 1); \
	spaces=$$(awk '/^MemTotal/ {print int($$2 / 6291456)}' /proc/meminfo 2>/dev/null); \
	[ "$${spaces:-1}" -lt "$$cores" ] && cores=$${spaces:-1}; \
	[ "$$cores" -lt 1 ] && cores=1; \
	echo $$cores)

# The stamp carries the checksum of the lock that was installed, to the end.
STAMP := .venv/.installed-$(firstword $(shell cksum < requirements.txt))
BIN := .venv/bin
UV := .uv/bin/uv

export PYTHONPATH := $(CURDIR)

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1@\2/p' $(firstword $(MAKEFILE_LIST)) \
		| awk -F@ '{printf "make %-12s %s\n", $$1, $$2}'

run: $(STAMP) ## Train on real digits under distributed DP (RUN_FLAGS="--help")
	$(BIN)/python -m scripts.run_distributed_dp $(RUN_FLAGS)

# The notebooks come first: they take longest, and the other processes go on meanwhile.
test: lint ## Check style, types, import rules, tests and notebooks (SLOW=1: all tests)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		$(if $(SLOW),,-m "not slow") $(PYTEST_FLAGS) \
		$(if $(wildcard notebooks/*.ipynb),--nbmake --nbmake-timeout=600 notebooks) tests

lint: $(STAMP) ## Check style, types and import rules only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## Time the operations, the engine, its scale and its data, as ratios
	$(BIN)/python -m benchmarks.ops
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.centaur

env: $(STAMP) ## Build .venv from the lock and do nothing else

$(STAMP):
	@sh tools/build_environment.sh $@ $(PYTHON)

lock: $(UV) ## Resolve requirements.in into the lock (LOCK_FLAGS=--upgrade: newer pins)
	$(UV) pip compile requirements.in --overrides overrides.txt \
		--python-version 3.11 --only-binary :all: --generate-hashes \
		--no-emit-index-url --custom-compile-command "make lock" --quiet \
		$(LOCK_FLAGS) --output-file requirements.txt

$(UV):
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9

build-files: $(STAMP) ## Rewrite the BUILD files after a module came, went or moved
	$(BIN)/python -m tools.write_build_files

clean: ## Remove the environment and what tools and builds left behind
	rm -rf .venv .uv .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
		.ruff_cache build dist *.egg-info bazel-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
