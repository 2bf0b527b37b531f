# Needs Python 3.10 to 3.13, a C++17 compiler and CMake; all else goes into .venv, without root.

# The Python of .venv once there is one, else python3; or name one: make setup PYTHON=python3.12
PYTHON ?= $(or $(shell test -x .venv/bin/python && echo .venv/bin/python),python3)
ARGS ?=
METHODS ?=
FRAMEWORK ?= torch
DEMO_torch := train_digits
DEMO_tensorflow := train_digits_keras

# Told to write no bytecode, as in many containers, every process would compile all that it imports.
# Open MPI refuses to start as root, as in a container, unless told twice.
RUN := env -u PYTHONDONTWRITEBYTECODE \
	PATH="$(CURDIR)/.venv/bin:$$PATH" TF_CPP_MIN_LOG_LEVEL=3 \
	OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

.PHONY: help setup demo check test test-all sanitize lint docs dist clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1  \t/p' Makefile

setup: ## make .venv with PyTorch, TensorFlow, MPI and Horovod (first time: some minutes)
	@test "$$($(PYTHON) -c 'print(1)' 2>/dev/null)" = 1 || \
		{ echo "setup: error: $(PYTHON) is no Python that runs: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py

demo: setup ## train on four processes; FRAMEWORK=tensorflow, METHODS="none topk" or all, ARGS=...
	@$(if $(DEMO_$(FRAMEWORK)),,{ echo "demo: error: FRAMEWORK is torch or tensorflow" >&2; exit 1; })
	@$(RUN) python -m mpi_examples.$(DEMO_$(FRAMEWORK)) $(if $(METHODS),--compression $(METHODS)) $(ARGS)

# Status 5: ARGS chose no test.
PYTEST := pytest -n logical --maxprocesses 8 --max-worker-restart 2
# What imports no TensorFlow and starts no other processes.
LAWS := tests/core/test_laws.py tests/systems/test_laws.py tests/engines/test_lockstep.py

check: lint ## a first answer in three minutes: lint, the laws in NumPy and PyTorch, lockstep
	@$(RUN) $(PYTEST) -k "not tensorflow and not drawn" $(LAWS) $(ARGS)

test: lint ## lint, then the tests, twelve to twenty minutes on two cores; make test ARGS="-k dgc"
	@$(RUN) $(PYTEST) $(ARGS) || [ $$? = 5 ]

test-all: lint sanitize ## the same with large arrays, many ranks, clusters, and training of all methods
	@$(RUN) $(PYTEST) --full $(ARGS) || [ $$? = 5 ]

sanitize: setup ## tests of the compiled loops under address, undefined-behaviour and thread sanitizers
	@$(RUN) python scripts/sanitize.py

lint: setup ## ruff, mypy, and the English of pages, docstrings and messages
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) python scripts/language.py

docs: setup ## the documentation as a site, in site/; needs Python 3.11
	@$(RUN) python scripts/docs.py $(ARGS)

dist: ## what is released: dist/ with an sdist and a wheel (manylinux) for PYTHON
	@$(PYTHON) scripts/dist.py

clean: ## remove .venv and everything built (the cache of Horovod wheels stays)
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results site .cache
	find . -name __pycache__ -type d -exec rm -rf {} +
