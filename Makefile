# Two commands do everything from a fresh clone: `make run` and `make test`.
# Choose the interpreter with `make PYTHON=python3.12 …`, the compiler with `make CXX=g++-12 …`.
SHELL := /bin/bash
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
MODEL := models/SmolLM2-135M-Instruct

# Threads that wait for one another sleep soon: on a machine with other work, spinning makes everything far slower.
export GOMP_SPINCOUNT ?= 1000

log := .venv/setup.log
pip := .venv/bin/python -m pip install --quiet --no-input --no-compile --disable-pip-version-check --retries 1 \
  -c constraints.txt
# Not among the constraints: torch for CUDA insists on a version of its own, torch for a CPU brings none.
triton := .venv/bin/python -c 'import triton' || $(pip) triton==3.9.0
native := $(filter-out %/golden.cpp,$(wildcard kernels/cpu/*.cpp)) $(wildcard kernels/cpu/*.h)

# $(error) is one line and exit code 2, where a failing recipe adds a line of make's own.
version := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)
need_python = $(if $(filter 3.10.% 3.11.% 3.12.% 3.13.%,$(version)),,$(error Python 3.10 to 3.13 is needed, but \
  $(PYTHON) is $(or $(version),not a Python). Choose one: make PYTHON=python3.12))
need_compiler = $(if $(shell command -v $(CXX) || command -v g++),,$(error a C++ compiler is needed, and \
  there is no g++. Debian: apt install g++))
# $(call attempt,what,commands,what may help); the commands' own words go to the log.
attempt = $(if $(dry_run),,$(info set-up: $(1))$(if $(shell { $(2); } >>$(log) 2>&1 && echo done),,$(error set-up stopped \
  at $(1)$(reason). $(3) See $(log))))
dry_run = $(findstring n,$(firstword -$(MAKEFLAGS)))
reason = $(shell sed -nE -e 's/^ERROR: (Cannot install|Could not .* requirement) ([^ ;]+).*/: no \2 to be had/p' \
  -e 's/^ *(.*[0-9]: (fatal )?error: .*)/: \1/p' $(log) | head -n 1)

.PHONY: help setup run study test check bench clean
help:  ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 14

setup: .venv/.ready  ## make .venv, install the packages, compile the kernels

run: .venv/.ready  ## fetch a real model, verify it, compare it with transformers, train it for five steps
	.venv/bin/vexact fetch smollm2
	.venv/bin/vexact verify $(MODEL) --dtype bfloat16 --seconds 60
	.venv/bin/python benchmarks/headline.py --to runs/headline.json
	.venv/bin/vexact train recipes/smollm2_chain_sum.yaml --steps 5

study: .venv/.ready  ## what mismatch, lag and remedies do: a small study and its report, within ten minutes on two cores
	.venv/bin/pytest -q tests/study/test_enumeration.py
	.venv/bin/vexact study studies/smoke.yaml
	.venv/bin/vexact report runs/smoke --output runs/smoke/report.html

test: .venv/.ready  ## every test
	.venv/bin/pytest -q

check: .venv/.ready  ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror kernels/cpu/*.cpp kernels/cpu/*.h

bench: .venv/.ready  ## measure beside torch and transformers; writes benchmarks/results
	set -e; for bench in benchmarks/bench_*.py; do .venv/bin/python $$bench; done

clean:  ## remove .venv and all that was built; models/ and runs/ stay
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Quick where little has changed: pip finds its packages in place and CMake compiles what is new.
.venv/.ready: pyproject.toml constraints.txt CMakeLists.txt $(native)
	$(need_python)$(need_compiler)$(shell mkdir -p .venv && rm -f $(log))
	$(call attempt,Python $(version),.venv/bin/python -m pip --version || $(PYTHON) -m venv .venv,Debian: apt install \
	  python3-venv.)
	$(call attempt,torch,$(pip) torch,Is the package index within reach?)
	$(call attempt,build tools,$(pip) scikit-build-core cmake ninja setuptools,Is the package index within reach?)
	$(call attempt,kernels,$(pip) --no-build-isolation --no-deps -e .,It takes g++ 11 or newer.)
	$(call attempt,triton,$(triton),Is the package index within reach?)
	$(call attempt,packages,$(pip) --no-build-isolation 'vexact[test]',Is the package index within reach?)
	@touch $@
