# Everything runs from .venv, which `make setup` makes; a path with spaces is fine.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python -P
STAMP := .venv/.patcher-ready

.PHONY: help setup demo test check bench clean

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@.ci/setup

setup: $(STAMP) ## make .venv and install patcher with its tools

demo: $(STAMP) ## the whole path on this machine's CPU: no GPU, no key
	@$(PY) -m patcher demo || [ $$? -eq 1 ] # 1: it ran, and a noisy machine could not tell

test: $(STAMP) ## run the tests
	@$(PY) -m pytest -q

check: $(STAMP) ## format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pyright

bench: $(STAMP) ## benchmarks; figures, not verdicts
	@$(PY) -m patcher.bench.lab
	@$(PY) -m patcher.integrate.cost

clean: ## remove .venv and caches
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .hypothesis
