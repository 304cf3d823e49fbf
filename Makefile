# Every target makes .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3
VENV ?= .venv
# Processes of pytest. On two cores: tests mostly wait, for ranks, a disk or a timeout, and fewer processes leave the cores idle.
WORKERS ?= 5
# Which of the supported versions of megatron-core: `oldest` or `newest`, as in pyproject.toml.
MEGATRON ?= oldest
BIN := $(VENV)/bin
PIP := tools/again $(BIN)/pip install -q --disable-pip-version-check
QUICK := tests/layout tests/format tests/plan tests/store tests/state tests/saving tests/views tests/equality tests/testing \
	tests/protocol/test_protocol.py tests/protocol/test_liveness.py tests/test_public.py
BENCHES := planning growth per_tensor small_save save_load megatron async_save unchanged defaults groups fsdp huggingface fingerprint standing watch objects local_tier

SUITE := not wide and not soak and not gpu
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	--durations 30 --durations-min 1
# What `make coverage` measures; `make coverage COVERED=tests` measures the suite, with all ranks that end by themselves.
COVERED ?= $(QUICK)

.PHONY: demo drill strangers engines check test wide coverage lint $(VENV)/.compiled changelog docs dist bench soak matrix clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'  # the pip of Python 3.11 knows no dependency groups (docs/decisions/0032)
	$(PIP) -c constraints.txt -e . --group demo
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(PIP) -c constraints.txt -e '.[megatron]' --group megatron-$(MEGATRON) --group demo --group test --group lint --group frameworks
	$(PIP) --no-deps --group functions --group bridge-$(MEGATRON)
	$(BIN)/python -m tests.support.third_parties
	touch $@

# Or hundreds of processes compile what they import, where no .pyc are written.
$(VENV)/.compiled: $(VENV)/.ready
	$(BIN)/python -m compileall -q src tests drill

$(VENV)/.strangers: $(VENV)/.ready
	$(PIP) -c constraints.txt --group strangers
	touch $@

# torchvision and its like are for CUDA on PyPI; the models of the tests need only the first one's Python.
$(VENV)-engines/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-engines
	tools/again $(VENV)-engines/bin/pip install -q --disable-pip-version-check 'pip>=25.1'
	tools/again $(VENV)-engines/bin/pip install -q --disable-pip-version-check -c constraints.txt -e . --group engines
	$(VENV)-engines/bin/pip uninstall -q -y torchaudio torchcodec
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(PIP) -c constraints.txt --group bench
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(PIP) -c constraints.txt --group docs
	touch $@

demo: $(VENV)/.demo  ## eight ranks train an MoE, one is killed in a save, the run resumes on other layouts
	$(BIN)/python -m examples.demo

drill: $(VENV)/.ready  ## the reports replayed, stock and with install() alone: docs/drill.md
	$(BIN)/python -m drill --json drill/results/drill.json --page docs/drill.md --front README.md
	$(BIN)/python -m drill.picture

strangers: $(VENV)/.strangers  ## other projects' own tests of checkpoints, on stock and on Holdfast: COPIES=a/folder/of/their/copies
	$(BIN)/python -m strangers $(if $(COPIES),--copies "$(COPIES)") --json strangers/results.json --page docs/users.md

engines: $(VENV)/.ready $(VENV)-engines/.ready  ## vLLM's own loader fills vLLM's own models on a CPU, and each fault is found: docs/engine.md
	ENGINES=$(CURDIR)/$(VENV)-engines/bin/python $(BIN)/python -m pytest tests/engines

check: lint  ## for the one who edits: lint, and the tests of the packages that need no second process
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "$(SUITE)" $(QUICK)

test: $(VENV)/.compiled  ## the suite
	$(PYTEST) -m "$(SUITE)"

wide: $(VENV)/.compiled  ## what the suite shows, in more layouts, frameworks, models and pages
	$(PYTEST) -m "wide and not soak and not gpu"

coverage: $(VENV)/.ready  ## the share of the source's lines that the tests of `make check` run
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile -m "$(SUITE)" $(COVERED)
	$(BIN)/python -m coverage combine -q
	@echo "coverage: $$($(BIN)/python -m coverage report --format=total) % of the lines of src/holdfast, by $(COVERED)"

lint: $(VENV)/.ready  ## style, types, direction of imports, that all that is public has a type, names of files in changes/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/towncrier build --draft --version next >$(VENV)/changes.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/basedpyright --verifytypes holdfast --ignoreexternal >$(VENV)/types.txt || { cat $(VENV)/types.txt; exit 1; }

changelog: $(VENV)/.ready  ## a step of a release: what changes/ says, under the version, at the head of CHANGELOG.md
	$(BIN)/towncrier build --yes --version $$($(BIN)/python -c "import holdfast; print(holdfast.__version__)")

docs: $(VENV)/.docs  ## the pages as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

dist: $(VENV)/.ready  ## a wheel and an sdist, in dist/
	$(PIP) --group dist
	$(BIN)/python -m build -q

bench: $(VENV)/.bench  ## the figures in docs/benchmarks.md, peers measured in the same run; fails if a page claims more
	mkdir -p bench/results
	set -e; for name in $(BENCHES); do $(BIN)/python -m bench.$$name --json bench/results/$$name.json; done
	$(BIN)/python -m bench.table

soak: $(VENV)/.ready  ## long runs: more simulated schedules, more faults
	$(BIN)/python -m pytest -m soak

matrix:  ## every supported Python, the oldest and the newest torch and megatron-core: docs/tested.md; model types without a table; ONLY="newest torch"
	$(PYTHON) tools/matrix.py $(if $(ONLY),--only "$(ONLY)")
	$(PYTHON) tools/model_types.py

clean:
	rm -rf .venv .venv-* .coverage* demo-out site dist
