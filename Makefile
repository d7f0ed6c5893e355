# Two commands: `make run` (the demo, engine and service) and `make test`. Both set everything up.
# On a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves some GB of CUDA libraries.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 9464
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: run test everyday test-slow test-ops test-vllm test-sglang test-gpu ops-files fuzz pictures image-lock image-digests lint format setup clean

# Memory that nobody wrote holds 0x7f bytes under glibc, so that a test that reads it fails each time, not once a week.
test everyday test-slow: export MALLOC_PERTURB_ := 128
# What is compiled is kept, also where the environment says otherwise: each process would compile all of it anew.
test everyday test-slow test-ops test-vllm test-sglang: export PYTHONDONTWRITEBYTECODE :=

run: setup
	@echo "make run: the demo starts; its service and console will be at http://127.0.0.1:$(PORT)/ until Ctrl-C"
	$(BIN)/canary-obs demo --serve --port $(PORT)

# Linters use one core for half a minute: the tests begin on the other.
test: setup
	$(MAKE) --no-print-directory -j2 lint everyday

# Two workers, each with whole files, in the order of tests/conftest.py.
BY_FILE = -n 2 --dist loadfile --no-loadscope-reorder

# Compiled once beforehand: each of the processes that attach first would do it for 20 s of its own.
COMPILED = import torch; from canary_obs.runtime.device.backend import choose_backend; choose_backend("auto", torch.device("cpu"))

everyday: setup
	$(BIN)/python -c '$(COMPILED)'
	$(BIN)/python -m pytest -m "not slow and not gpu and not ops" $(BY_FILE) tests

# Files of everyday tests of which `make test` runs fewer examples, steps or cases (tests/sizes.py): those
# tests run whole here, a third of them for each commit, the others of these files not again. Those of real engines need
# their environment, and .ci/nightly.
WHOLE_TESTS = $(shell grep -rl --include='test_*.py' --exclude-dir=real 'import sized' tests)

# Seeded defects use both cores themselves; of the others, two run at a time. -rP shows what those printed, such as figures.
test-slow: setup
	$(BIN)/python -m pytest -s -m slow tests/mutation
	$(BIN)/python -m pytest -rP -m "slow and not gpu and not ops" -n 2 --dist worksteal tests --ignore tests/mutation
	CANARY_TESTS_WHOLE=$(or $(CANARY_TESTS_WHOLE),turn) $(BIN)/python -m pytest -m "sized and not slow and not gpu" -n 2 $(WHOLE_TESTS)

# Needs prometheus, prometheus-alertmanager, npm, chromium, docker-compose and, as root, ip; what is missing is named as skipped.
test-ops: setup
	$(BIN)/python -m pytest -m ops tests/ops

# Everything that is generated: metric docs, rules, their tests, dashboards, manifests.
# RUNBOOK_BASE=https://wiki.example/runbooks makes alerts and dashboards link to your copy of the runbooks.
ops-files: setup
	$(BIN)/canary-obs metrics --format md > docs/metrics.md
	$(BIN)/python -m alerts.render
	$(BIN)/python -m alerts.tests.build
	$(BIN)/python -m dashboards.build
	$(BIN)/python -m dashboards.manifests

# 5000 made-up requests with each scope, over the whole API; SEED=N repeats a run. .ci/nightly does it with fresh seeds.
fuzz: setup
	$(BIN)/python -m tests.service.api_cases 5000 $(if $(SEED),--seed $(SEED))

# docs/images, taken in a real browser; needs chromium, pngquant and prometheus.
pictures: setup
	$(BIN)/python -m tools.pictures.console
	$(BIN)/python -m tools.pictures.boards

# The wheels of the service's image by their hashes, as PyPI has them; needs the network. After each change of constraints.txt.
image-lock: setup
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= $(BIN)/python -m tools.image_lock

# FROM and compose images by their present digests; needs docker and a registry.
image-digests: setup
	$(BIN)/python -m tools.image_digests

# Real engines on the CPU, in an environment of their own that both share. On a slow machine the start of some
# takes minutes: what ends a test is meant for one that hangs.
ENGINE_TESTS = .venv-engines/bin/python -m pytest -o filterwarnings= --timeout 600

test-vllm: .venv-engines/.installed
	$(ENGINE_TESTS) $(BY_FILE) tests/engines/vllm

test-sglang: .venv-engines/.installed
	$(ENGINE_TESTS) $(BY_FILE) tests/engines/sglang

.venv-engines/.installed: tests/engine_requirements.txt pyproject.toml
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/engine_requirements.txt
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-gpu:
	$(PYTHON) -m pytest -m "not slow" tests/kernels tests/gpu

lint: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed

# torch alone first: a plain "torch" pulled in by another package would ignore the constraint file.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: run make PYTHON=python3.11 ..."; exit 2; }
	test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || $(MAKE) --no-print-directory venv-package
	@echo "setup 1 of 2: torch into $(VENV); the download is large, the first time takes minutes"
	$(PIP) -c constraints.txt torch
	@echo "setup 2 of 2: canary_obs and what its tests need"
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# Debian and Ubuntu ship python3 without ensurepip.
.PHONY: venv-package
venv-package:
	@echo "python3-venv is missing: installing it"
	rm -rf $(VENV)
	SUDO=$$([ $$(id -u) = 0 ] || echo sudo); $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq python3-venv
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
