# `make demo`: engines, a router and a table of what moved. `make test`: every test. Both start from nothing.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
DEMO_ARGS ?= --json demo.json
READY := $(VENV)/.ready

.PHONY: help venv demo test test-full test-fast bench-core lint diagrams clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/' | expand -t 20

venv: $(READY) ## everything installed in .venv (Python 3.11; a few minutes, 4 GB)

# The stamp is older than the lock, or not there after an interrupted run: install again over what is there.
$(READY): requirements-cpu.lock pyproject.toml tests/ci/install.sh tests/ci/system_packages.sh
	@bash tests/ci/install.sh "$(VENV)" "$(PYTHON)"
	@touch "$@"

demo: $(READY) ## prompts through real engines in both modes, checked token for token; writes demo.json
	@"$(VENV)/bin/dfirst" demo $(DEMO_ARGS)

test: test-fast ## everything, with real engines (about 13 minutes)
	@"$(VENV)/bin/python" -m pytest -m "(e2e or slow) and not full" $(PYTEST_ARGS)

test-full: test-fast ## also every layout, more crashes and eight minutes of chaos (about an hour)
	@"$(VENV)/bin/python" -m pytest -m "e2e or slow" $(PYTEST_ARGS)

# More workers than cores, as many tests wait for time-outs.
test-fast: lint ## what starts no vLLM server (under 90 seconds)
	@"$(VENV)/bin/python" -m pytest -m "not e2e and not slow" -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

bench-core: $(READY) ## what a transfer costs the core, and that it costs the same beside 10,000 others
	@"$(VENV)/bin/dfirst" bench core

lint: $(READY) ## ruff, formatting, mypy strict on the core and the spec
	@bash tests/ci/lint.sh "$(VENV)"

diagrams: $(READY) ## the state diagrams in spec/diagrams, drawn again from the spec
	@"$(VENV)/bin/dfirst" diagrams spec/diagrams

clean: ## the demo's files and all caches; the environment stays
	@rm -rf .demo .bench .chaos .explore demo.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
