# The two commands are `make demo` and `make test`; each does all set-up itself. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export CARGO_TARGET_DIR ?= $(HOME)/.cache/sandmill/target
TARGET := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
RUST_SOURCES := $(shell find crates .cargo Cargo.toml Cargo.lock -type f 2>/dev/null)
DEMO_OUT ?= out/demo

.PHONY: help setup system binaries demo test test-fast test-real test-rust check format bench wheel clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: system $(VENV)/.ready binaries   ## Debian packages (as root), .venv/ and both daemons

system:
	@scripts/setup-system.sh

# The venv is made anew when the project's dependencies change.
$(VENV)/.ready: pyproject.toml | system
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sandmill needs Python 3.11 or newer: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m compileall -q src
	touch $@

binaries: src/sandmill/_bin/.stamp

src/sandmill/_bin/.stamp: $(RUST_SOURCES) scripts/build_binaries.py
	$(PYTHON) scripts/build_binaries.py
	@touch $@

demo: setup      ## the main job: every example task, oracle and nop, graded
	$(BIN)/sandmill eval examples/tasks --agent oracle --agent nop -k 4 --concurrency 4 --out $(DEMO_OUT) --fresh

test: test-rust test-fast test-real   ## all tests

test-fast: setup ## no namespaces, no sleeping, under a minute
	$(BIN)/python -m pytest -q -m 'not real' tests

test-real: setup ## real processes, mounts, cgroups, clients
	$(BIN)/python -m pytest -q -m real tests

test-rust: setup
	cargo test --release --locked --target $(TARGET) --workspace

check: setup     ## format, lint, types
	cargo fmt --all --check
	cargo clippy --release --locked --target $(TARGET) --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check src tests benchmarks scripts hatch_build.py
	$(BIN)/ruff check src tests benchmarks scripts hatch_build.py
	$(BIN)/mypy

format:
	cargo fmt --all
	$(BIN)/ruff format src tests benchmarks scripts hatch_build.py
	$(BIN)/ruff check --fix src tests benchmarks scripts hatch_build.py

bench: setup     ## us beside raw clone+overlay+pivot, bwrap, runc and host spawn, in one run
	$(BIN)/sandmill bench

wheel: setup     ## a wheel that holds both daemons
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) src/sandmill/_bin dist build out .mypy_cache .ruff_cache .pytest_cache
