# `make run` and `make test` do all set-up themselves; `make help` lists the rest.

# The interpreter that .venv is made from, the folder of that environment, and the torch that is
# installed into it if neither has one: words for pip, so an index can be named too, as in
#   make run TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

# PY=/path/to/python uses an environment as it is: nothing is created, and what lacks is installed.
PY ?= $(VENV)/bin/python
py := $(or $(shell command -v $(PY)),$(PY))

# 1: warnings of the host compiler, spills and serialized wgmma end the build.
export FLASH_CUDA_STRICT ?= 1

STAMPS := build/stamps/$(subst /,_,$(abspath $(py)))
# The one beside the interpreter: another version formats differently.
clang_format = PATH="$(dir $(py)):$$PATH" clang-format
CPP_FILES = $(shell git ls-files 'csrc/*' 'tests/cpp/*' 'emulator/*' \
	| grep -E '\.(h|cuh|cu|cpp)$$' | grep -vE '_gen\.h$$')

# A file of tests stays in one process; the engine is set to one thread there.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help run test build bench lint format lint-python lint-cpp lint-layers build-report clean \
	emulator-crosscheck

help:  ## this list
	@grep -hE '^[a-z_.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

run: $(STAMPS)-bench build  ## train a small GPT on flash_cuda, then a short benchmark
	$(py) examples/train_gpt.py
	$(py) -m bench.run --suite smoke,cpu

test: $(STAMPS)-test $(STAMPS)-bench build  ## every test that this machine can run
	$(py) -m pytest $(PYTEST_ARGS)

bench: $(STAMPS)-bench build  ## the benchmark; BENCH_ARGS="--suite train --json out.json"
	$(py) -m bench.run $(BENCH_ARGS)

build: $(STAMPS)-package  ## compile what changed in csrc/; FLASH_CUDA_ARCHS chooses the GPUs
	$(py) -m build_tools

lint: lint-python lint-cpp lint-layers  ## what pre-commit runs: ruff, mypy, clang-format, layers

lint-python: $(STAMPS)-dev
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy

lint-cpp: $(STAMPS)-dev
	$(clang_format) --dry-run -Werror $(CPP_FILES)

lint-layers: $(STAMPS)-dev
	$(py) tools/check_layers.py

format: $(STAMPS)-dev  ## write the format that lint asks for
	$(py) -m ruff check --fix .
	$(py) -m ruff format .
	$(clang_format) -i $(CPP_FILES)

build-report: build  ## the longest files and functions, compile times, registers and spills
	$(py) tools/build_report.py

emulator-crosscheck: $(STAMPS)-test  ## CUTLASS's own kernels through the emulator
	$(py) -m emulator.crosscheck

compile_commands.json: $(STAMPS)-package  ## for editors and clang-tidy
	$(py) -m build_tools --compile-commands

clean:  ## remove what was built (not .venv)
	rm -rf build dist flash_cuda/_C*.so compile_commands.json *.egg-info

# The environment, then the package in it as an editable install, then what a job needs on top.
$(VENV)/bin/python:
	$(PYTHON) build_tools/environment.py $(VENV) --torch "$(TORCH)"

# build_tools first: it shows its progress, pip would hide it.
$(STAMPS)-package: pyproject.toml setup.py | $(py)
	$(py) -m build_tools
	$(py) -m pip install --quiet --no-build-isolation --no-deps -e .
	@mkdir -p $(@D) && touch $@

$(STAMPS)-%: $(STAMPS)-package
	$(py) -m pip install --quiet --no-build-isolation -e '.[$*]'
	@touch $@
