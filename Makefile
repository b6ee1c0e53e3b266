# make demo            the main job on a tiny model, about 4 minutes on 2 cores
# make demo-smollm2    the same on SmolLM2-135M
# make test            linters, types, import rules, all tests
# make check           the first three alone
# Everything happens in .venv, which each target makes first if it is missing or out of date.
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12); otherwise the first that fits is taken.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.bucketrl-ready

export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# uv leaves packages uncompiled: what is imported is compiled once, and not by each of some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-smollm2 test check clean

setup: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml tools/setup.sh
	@PYTHON="$(PYTHON)" sh tools/setup.sh .venv
	@touch $@

demo: $(STAMP)
	$(BIN)/bucketrl run examples/tiny.toml --evaluate 200

demo-smollm2: $(STAMP)
	$(BIN)/bucketrl run examples/smollm2.toml --evaluate 200

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check
	BUCKETRL_REQUIRE_S3_SERVERS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2
	BUCKETRL_REQUIRE_S3_SERVERS=1 $(BIN)/python -m pytest -m slow --durations=25

clean:
	rm -rf .venv runs dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
