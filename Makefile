# Everything from a fresh clone: needs Python >= 3.11 and a package index, nothing else.
# `make` lists the targets; PYTHON=/path/to/python3.12 chooses the interpreter of a new .venv.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# pip, not uv, even where uv is installed: pip.conf (mirrors, proxies, certificates) must keep its effect.
# Byte code is compiled at first use: compiling all of it here takes longer than the download.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=

.PHONY: help demo test lint format bench soak docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.installed ## one command to a running fleet on this machine (DEMO_ARGS)
	@exec $(BIN)/dynamo-es demo $(DEMO_ARGS)

test: $(VENV)/.installed-test ## all tests that this machine can run (PYTEST_ARGS)
	@exec $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint ## ruff, mypy, and whether the generated documents are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m schemas --check
	$(BIN)/python -m dynamo_es.config.document --check README.md

format: $(VENV)/.installed-lint ## let ruff format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test ## measure every hot path (BENCH_ARGS: names to run)
	@exec $(BIN)/python -m tests.bench $(BENCH_ARGS)

soak: $(VENV)/.installed-test ## half an hour under load: memory flat, no lag, no error (SOAK_ARGS: --backend kafka)
	@exec $(BIN)/python -m tests.bench.soak $(SOAK_ARGS)

docs: $(VENV)/.installed ## write the generated documents (schemas/json, schemas/asyncapi.json)
	$(BIN)/python -m schemas
	$(BIN)/python -m dynamo_es.config.document README.md

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# An interpreter is tried out, not just looked up: version managers put shims on PATH that only print an error.
$(VENV)/.created:
	@set -e; \
	for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    chosen=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "make: no Python >= 3.11 among: $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python)." \
	    "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	fi; \
	if ! "$$chosen" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "make: $$chosen has no venv module. Debian and Ubuntu: apt install" \
	    "$$("$$chosen" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$chosen" --version)"; \
	"$$chosen" -m venv $(VENV); touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.created
	@echo "installing dynamo-es (first time: about a minute)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.created
	@echo "installing dynamo-es with what the tests need"
	@$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml $(VENV)/.created
	@echo "installing dynamo-es with what lint and tests need"
	@$(INSTALL) -e '.[lint,test]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test
