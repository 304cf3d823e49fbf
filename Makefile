# Every target makes .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
# Processes of pytest: ranks mostly wait, for each other or for a timeout.
WORKERS ?= 3
BIN := $(VENV)/bin
VENVS := $(VENV)-torch-2.6.0 $(VENV)-torch-2.15.0
# Megatron-Bridge 0.6 runs on Python 3.12 alone.
PYTHON312 ?= $(shell for python in python3.12 $(PYTHON) "$$HOME"/.pyenv/versions/3.12.*/bin/python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$python" && break; done)
NEWEST := $(VENV)-megatron-0.19.2
# The pip of Python 3.11 knows no dependency groups (docs/decisions/0032).
NEW_PIP := pip install -q --disable-pip-version-check 'pip>=25.1'
PORTABLE := tests/promises tests/roster tests/store tests/protocol tests/saving tests/background \
	tests/test_public.py tests/state/test_optimizers.py tests/integrations/test_dcp_marker.py tests/integrations/test_dcp_arguments.py \
	tests/state/test_nothing.py \
	tests/state/test_meta.py tests/state/test_tensors.py tests/state/test_flatten.py \
	tests/system/test_ranks.py tests/system/test_content.py
QUICK := tests/layout tests/format tests/plan tests/store tests/state tests/saving tests/views tests/maintenance tests/testing \
	tests/protocol/test_protocol.py tests/protocol/test_liveness.py tests/test_public.py
FRAMEWORKS := tests/integrations tests/groups tests/promises tests/state
BENCHES := planning growth per_tensor small_save save_load megatron async_save unchanged defaults groups fsdp huggingface standing watch

.PHONY: demo drill strangers check test lint docs dist bench soak matrix clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(NEW_PIP)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[megatron]' megatron-core==0.16.1 \
		--group demo --group test --group lint --group frameworks
	$(BIN)/pip install -q --disable-pip-version-check --no-deps verl==0.9.1 megatron-bridge==0.3.1 ms-swift==4.6.0 mcore-bridge==1.6.5 mbridge==0.15.1 pytorch_optimizer==4.1.0 torchao==0.18.0 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0  # functions of theirs are called by tests; their dependencies are not needed
	touch $@

$(VENV)/.strangers: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --group strangers
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --group bench
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --group docs
	touch $@

demo: $(VENV)/.ready  ## eight ranks train an MoE, one is killed in a save, the run resumes on other layouts
	$(BIN)/python -m examples.demo

drill: $(VENV)/.ready  ## the reports replayed, stock and with install() alone: docs/drill.md
	$(BIN)/python -m drill --json drill/results/drill.json --page docs/drill.md --front README.md
	$(BIN)/python -m drill.picture

strangers: $(VENV)/.strangers  ## other projects' own tests of checkpoints, on stock and on Holdfast: COPIES=a/folder/of/their/copies
	$(BIN)/python -m strangers $(if $(COPIES),--copies "$(COPIES)") --json strangers/results.json --page docs/users.md

check: lint  ## for the one who edits: lint, and the tests of the packages that need no second process
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not soak and not gpu" $(QUICK)

test: $(VENV)/.ready  ## the suite
	$(BIN)/python -m compileall -q src tests drill  # or hundreds of processes compile what they import, where no .pyc are written
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not soak and not gpu"

lint: $(VENV)/.ready  ## style, types, direction of imports, and that all that is public has a type
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/basedpyright --verifytypes holdfast --ignoreexternal >$(VENV)/types.txt || { cat $(VENV)/types.txt; exit 1; }

docs: $(VENV)/.docs  ## the pages as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

dist: $(VENV)/.ready  ## a wheel and an sdist, in dist/
	$(BIN)/pip install -q --disable-pip-version-check --group dist
	$(BIN)/python -m build -q

bench: $(VENV)/.bench  ## the figures in docs/benchmarks.md, peers measured in the same run
	mkdir -p bench/results
	set -e; for name in $(BENCHES); do $(BIN)/python -m bench.$$name --json bench/results/$$name.json; done
	$(BIN)/python -m bench.table

soak: $(VENV)/.ready  ## long runs: more simulated schedules, more faults
	$(BIN)/python -m pytest -m soak

matrix: $(VENVS:%=%/.ready) $(NEWEST)/.ready  ## the oldest and the newest torch, and the newest Megatron, that are supported
	set -e; for venv in $(VENVS); do $$venv/bin/python -m pytest -m "not soak and not gpu" $(PORTABLE); done
	$(NEWEST)/bin/python -m pytest -m "not soak and not gpu" $(FRAMEWORKS)

$(VENV)-torch-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(NEW_PIP)
	$(@D)/bin/pip install -q --disable-pip-version-check torch==$* -e . --group test
	touch $@

$(NEWEST)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON312)" || { echo "No Python 3.12 found, which Megatron-Bridge 0.6 needs. Install it, or name it: make matrix PYTHON312=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/$(NEW_PIP)
	$(@D)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[megatron]' megatron-core==0.19.2 \
		--group test --group frameworks
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps verl==0.9.1 megatron-bridge==0.6.2 ms-swift==4.6.0 mcore-bridge==1.6.5 mbridge==0.15.1 pytorch_optimizer==4.1.0 torchao==0.18.0 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0
	touch $@

clean:
	rm -rf $(VENV) $(VENVS) $(NEWEST) demo-out site dist
