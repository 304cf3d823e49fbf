# Every target makes .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHES := planning per_tensor save_load megatron async_save groups fsdp

.PHONY: demo test lint bench soak clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,test,lint,megatron]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps verl==0.9.1 megatron-bridge==0.3.1 ms-swift==4.6.0 mcore-bridge==1.6.5 pytorch_optimizer==4.1.0 torchao==0.18.0  # functions of theirs are called by tests; their dependencies are not needed
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

demo: $(VENV)/.ready  ## eight ranks train an MoE, one is killed in a save, the run resumes on other layouts
	$(BIN)/python -m examples.demo

test: $(VENV)/.ready  ## the suite
	$(BIN)/python -m pytest -m "not soak and not gpu"

lint: $(VENV)/.ready  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench  ## the figures in docs/benchmarks.md, peers measured in the same run
	mkdir -p bench/results
	set -e; for name in $(BENCHES); do $(BIN)/python -m bench.$$name --json bench/results/$$name.json; done
	$(BIN)/python -m bench.table

soak: $(VENV)/.ready  ## long runs: more simulated schedules, more faults
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf $(VENV) demo-out
