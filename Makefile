# `make` alone lists what there is. Everything runs in .venv, which is made from requirements.lock.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_PROMPT ?= Tom has 3 apples and buys 5 more. How many apples does Tom have?
DEMO_TOKENS ?= 64
# The fast tests run in so many processes, the tests of a file in one of them, in the order of pyproject.toml's testpaths.
TEST_PROCESSES ?= 2
export DEMO_PROMPT

# Hundreds of processes import our modules: each would compile them again where the environment asks for no bytecode.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help env packages demo test fuzz chaos world test-system test-slow figures format lint types stubs stubs-check lock dist clean python-check

PIP_FLAGS := --disable-pip-version-check --no-input --root-user-action=ignore

# hqq's setup.py would otherwise compile CUDA kernels, which we do not use, and install them into whichever `python` is first on PATH.
export DISABLE_CUDA := 1

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: env  ## answer one question with the small model in models/chat-moe (DEMO_PROMPT=..., DEMO_TOKENS=...)
	@$(BIN)/odmoe generate -m models/chat-moe --shadow nf4 -n $(DEMO_TOKENS) --chat "$$(printf '%b' "$$DEMO_PROMPT")"

test: lint types stubs-check  ## lint, types, stubs and the fast test suite
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# These have the machine to themselves: they start Ray, have bounds of seconds, or need a shadow that keeps up.
ALONE := tests/system/on_ray tests/system/promises tests/system/testbed tests/system/test_ten_hosts.py \
    tests/system/nodes/test_broken_blocks.py tests/system/commands/test_wheel.py

# As root; a test that cannot run here (no sshd, no namespaces) is skipped and says why.
test-system: env  ## the tests that start clusters: Ray, ssh, ten hosts, kills (21 minutes on two cores)
	@status=0; \
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(ALONE:%=--ignore %) tests/system || status=1; \
	$(BIN)/python -m pytest $(ALONE) || status=1; \
	exit $$status

fuzz: env  ## 300,000 mutated messages for each kind of node (FRAMES=..., FUZZ_SEED=...; one to two hours)
	@FRAMES=$(or $(FRAMES),300000) FUZZ_SEED=$(or $(FUZZ_SEED),1000) $(BIN)/python -m pytest -n 0 tests/system/nodes/test_fuzzed_frames.py

chaos: env  ## real faults on nodes in processes of their own, under load (CHAOS_S=..., CHAOS_SEED=..., CHAOS_CLUSTERS=...; docs/promises.md)
	@seq $(or $(CHAOS_SEED),1) $$(($(or $(CHAOS_SEED),1) + $(or $(CHAOS_CLUSTERS),4) - 1)) | xargs -P 0 -I {} \
		env CHAOS_S=$(or $(CHAOS_S),1200) CHAOS_SEED={} $(BIN)/python -m pytest -q -n 0 tests/system/promises/test_chaos.py

test-slow: env  ## the slow tests: many cases of what the fast ones try a few of (22 minutes on two cores)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m slow

world: env  ## the nodes' own code in simulated worlds with faults, drawn from seeds (SEEDS=1000, FIRST=0)
	@PYTHONPATH=tests $(BIN)/python -m support.simulated.run --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

figures: env  ## draw the papers' figures again, into results/figures (QUICK=1: small ones, in half an hour)
	@$(BIN)/python -m scripts.figures $(if $(QUICK),--quick)

format: env  ## ruff: format the code, and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lint: env  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: env  ## mypy
	@$(BIN)/mypy

stubs: env  ## write wire/odmoe_pb2* again from proto/, keywords.py and docs/cli.md from the settings
	@$(BIN)/python scripts/generate_stubs.py
	@$(BIN)/python scripts/generate_keywords.py
	@$(BIN)/python scripts/generate_cli_docs.py

stubs-check: env
	@$(BIN)/python scripts/generate_stubs.py --check
	@$(BIN)/python scripts/generate_keywords.py --check
	@$(BIN)/python scripts/generate_cli_docs.py --check
	@$(BIN)/python scripts/runtime_lock.py --check

packages: $(VENV)/.locked  # what the hosts of a cluster need: our own code reaches them otherwise

env: $(VENV)/.installed  ## make or refresh .venv, when it is missing or older than the lock

$(VENV)/.installed: pyproject.toml $(VENV)/.locked
	@$(BIN)/python -m pip install $(PIP_FLAGS) -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Whether the very versions of the lock file are installed. Its time does not tell: git and pip write it anew.
AS_LOCKED := import re, sys; from importlib.metadata import version; \
    pins = re.findall(r"^([\w.-]+)==(\S+)$$", open("requirements.lock").read(), re.M); \
    sys.exit(any(version(name).partition("+")[0] != pin for name, pin in pins))

# pip's full account goes to pip.log; what is shown is enough to see that it moves. The shell reads it, since mawk would
# read ahead and show everything at the end.
$(VENV)/.locked: requirements.lock
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    $(MAKE) --no-print-directory python-check; \
	    echo "Making $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear $(VENV); \
	fi
	@if $(BIN)/python -c '$(AS_LOCKED)' 2>/dev/null; then touch $@ 2>/dev/null || true; exit 0; fi; \
	total=$$(grep -c == requirements.lock); \
	echo "Installing $$total packages from requirements.lock: minutes the first time"; \
	$(BIN)/python -m pip install $(PIP_FLAGS) --progress-bar off -r requirements.lock 2>&1 | tee $(VENV)/pip.log | { \
	    found=0; large='\([0-9][0-9]+\.[0-9] MB\)'; \
	    while read -r word name size unit rest; do case "$$word $$name $$size $$unit $$rest" in \
	      "Collecting "*"-r requirements.lock"* | "Processing "*"-r requirements.lock"* | "Requirement already satisfied: "*"-r requirements.lock"*) \
	        found=$$((found + 1)); if ((found % 20 == 0)); then echo "  found $$found of $$total"; fi ;; \
	      "Downloading "*) if [[ "$$size $$unit" =~ $$large ]]; then echo "  downloading $$name $$size $$unit"; fi ;; \
	      "Installing collected packages"*) echo "  unpacking" ;; \
	    esac; done; } \
	  || { grep '^ERROR' $(VENV)/pip.log >&2 || tail -n 20 $(VENV)/pip.log >&2; \
	       echo "pip could not install requirements.lock; its full account is in $(VENV)/pip.log" >&2; exit 1; }; \
	touch $@

python-check:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); this project needs Python 3.11 or newer. Say which: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# Builds of torch have suffixes (+cpu, +cu130) and CUDA wheels of their own: the lock names neither, so it serves any Linux machine.
# What is locked stays as it is, so that a new package moves no other; UPGRADE=1 takes the newest of everything.
lock: python-check  ## resolve pyproject.toml again in a fresh environment and write requirements.lock (UPGRADE=1: newest versions)
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	echo "Resolving pyproject.toml with $$($(PYTHON) --version): some minutes"; \
	$(PYTHON) -m venv "$$work/venv"; \
	"$$work/venv/bin/python" -c 'import tomllib; t = tomllib.load(open("pyproject.toml", "rb")); p = t["project"]; \
	print(*t["build-system"]["requires"], *p["dependencies"], *p["optional-dependencies"]["dev"], sep="\n")' > "$$work/asked.txt"; \
	"$$work/venv/bin/python" -m pip install $(PIP_FLAGS) -qq $(if $(UPGRADE),--upgrade,--constraint requirements.lock) -r "$$work/asked.txt"; \
	{ echo "# Made by \`make lock\`: what pyproject.toml asks for, dev included, resolved in a fresh environment and frozen. Not edited by hand."; \
	  "$$work/venv/bin/python" -m pip freeze --disable-pip-version-check --all --exclude pip \
	  | sed -E 's/\+[A-Za-z0-9.]+$$//' | grep -Ev '^(nvidia-|cuda-|triton==)'; } > "$$work/lock"; \
	if grep -v '^#' "$$work/lock" | grep -vE '^[A-Za-z0-9._-]+==[A-Za-z0-9.!]+$$'; then echo "These lines are not exact pins; requirements.lock is left as it was." >&2; exit 1; fi; \
	cat "$$work/lock" > requirements.lock; \
	"$$work/venv/bin/python" -m pip install $(PIP_FLAGS) -qq packaging; "$$work/venv/bin/python" scripts/runtime_lock.py; \
	echo "requirements.lock: $$(grep -c == requirements.lock) packages"

# Of tracked files alone, in a folder of its own: leftovers in build/ would be in it too.
dist: env  ## a wheel in dist/, with the demo model and what hosts of a cluster need
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	git ls-files -z | xargs -0 cp --parents -t "$$work"; \
	export ODMOE_COMMIT="$$(git describe --always --dirty --exclude='*')"; mkdir -p dist; \
	$(BIN)/python -m pip wheel $(PIP_FLAGS) -q --no-deps --no-build-isolation -w dist "$$work"; \
	ls -l dist/*.whl

clean:  ## remove .venv, caches and build leftovers (results/ stays)
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
