# Sets up a virtual environment and runs kbench in it. `make help` lists the targets.
#
# PYTHON  the interpreter to start from
# VENV    where the environment goes; empty means: use PYTHON as it is and install nothing
# EXTRA   which CUDA packages to install: cuda13, cuda12 or none; found out from the driver if left out

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

# Drivers from 580 on run CUDA 13, from 525 on CUDA 12 (the minimum versions of CUDA's release notes).
DRIVER_EXTRA := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | \
	awk -F. 'NR == 1 && $$1 + 0 >= 580 { print "cuda13" } NR == 1 && $$1 + 0 >= 525 && $$1 + 0 < 580 { print "cuda12" }')
CUDA := $(or $(strip $(EXTRA)),$(DRIVER_EXTRA),none)

# In a call a comma that stands for itself would end an argument.
comma := ,
RUN_EXTRAS := $(if $(filter none,$(CUDA)),,[$(CUDA)])
TRAIN_EXTRAS := [data$(if $(filter none,$(CUDA)),,$(comma)$(CUDA))]
# Tests compile every kernel for GPUs, with or without one.
TEST_EXTRAS := [dev,data,$(if $(filter none,$(CUDA)),nvrtc13,$(CUDA))]

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
RUN_READY := has-run-modules
TRAIN_READY := has-run-modules
TEST_READY := has-test-modules
GPU_TEST_READY := has-gpu-test-modules
else
PY := $(VENV)/bin/python
# The names hold the extra, so that a machine that got a GPU is set up again.
RUN_READY := $(VENV)/.ready-run-$(CUDA)
TRAIN_READY := $(VENV)/.ready-train-$(CUDA)
TEST_READY := $(VENV)/.ready-test-$(CUDA)
GPU_TEST_READY := $(TEST_READY)
endif

.DEFAULT_GOAL := help
.PHONY: help run sweep train test test-all test-cuda12 gpu-test ci-report update-baseline lint clean
.PHONY: has-run-modules has-test-modules has-gpu-test-modules

help:
	@echo "make run       set up, then: kbench run attention_backward --version 5   (ARGS=... adds options)"
	@echo "make sweep     set up, then: kbench sweep attention_backward             (ARGS=... adds options)"
	@echo "make train     set up, then: kbench train gpt2                           (ARGS=... adds options)"
	@echo "make test      set up, then lint and all tests but the slow ones         (PYTEST_ARGS=... for pytest)"
	@echo "make test-all  the slow ones too"
	@echo "make test-cuda12  import and compile with CUDA 12's packages, in an environment of their own"
	@echo "make gpu-test  only the tests that need a GPU"
	@echo "make ci-report  compile every kernel and compare with results/baselines/static; no GPU"
	@echo "make update-baseline  write that baseline anew, where a change of registers is meant"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove the environment and caches; results/ stays"
	@echo "With PYTHON=python3 VENV= any target uses that interpreter as it is and installs nothing."

run: $(RUN_READY)
	$(PY) -m kbench run attention_backward --version 5 $(ARGS)

sweep: $(RUN_READY)
	$(PY) -m kbench sweep attention_backward $(ARGS)

train: $(TRAIN_READY)
	$(PY) -m kbench train gpt2 $(ARGS)

test: lint
	$(PY) -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

test-all: lint
	$(PY) -m pytest -n 2 $(PYTEST_ARGS)

# All of the extra cuda12 but cuBLAS and NVML, which do nothing without a GPU. No GPU has run this combination.
test-cuda12: $(VENV)-cuda12/.ready
	$(VENV)-cuda12/bin/python -m pytest $(CUDA12_TESTS) $(PYTEST_ARGS)

CUDA12_TESTS := $(wildcard tests/unit/test_cu*.py tests/unit/test_nvrtc*.py tests/unit/test_*compile*.py)

gpu-test: $(GPU_TEST_READY)
	$(PY) -m pytest tests/gpu $(PYTEST_ARGS)

# What NVRTC makes of kbench's own kernels, held against what is committed. In a folder of its own: the user's runs in
# results/ stay the latest ones. Tables of that many rows are of use only where something is wrong with one.
STATIC := sweep --static --arch sm_90 --dtype fp32,bf16
ci-report: $(TEST_READY)
	@mkdir -p build/ci
	@$(PY) -m kbench $(STATIC) --results build/ci > build/ci/static.txt || { status=$$?; cat build/ci/static.txt; exit $$status; }
	@$(PY) -m kbench report results/baselines/static.jsonl.gz latest --results build/ci $(ARGS) || { status=$$?; \
	  echo "make: if that is meant, write the baseline anew in the same change: make update-baseline" >&2; exit $$status; }

update-baseline: $(TEST_READY)
	@mkdir -p build/ci
	@$(PY) -m kbench $(STATIC) --results results --save static > build/ci/static.txt || { status=$$?; cat build/ci/static.txt; exit $$status; }
	@tail -n 1 build/ci/static.txt

lint: $(TEST_READY)
	$(PY) -m ruff check
	$(PY) -m mypy

clean:
	rm -rf $(if $(strip $(VENV)),"$(VENV)" "$(VENV)-cuda12") build dist .mypy_cache .pytest_cache .ruff_cache
	find src tests dev_kernels -name __pycache__ -type d -prune -exec rm -rf {} +

# With VENV= nothing is installed, so what is missing is said before Python says it in a traceback.
RUN_MODULES := numpy ml_dtypes typer rich pandas
TEST_MODULES := $(RUN_MODULES) pytest xdist ruff mypy pandas-stubs

# Old enough for the Python that it complains about.
define NEW_ENOUGH
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
  echo "make: kbench needs Python 3.11 or later, and '$(PYTHON)' is older or not there; say which with PYTHON=python3.12" >&2; exit 1; }
endef
# $(1): modules; $(2): the extras of kbench that hold them.
define HAS_MODULES
@lacks=$$($(PYTHON) -c 'import sys; from importlib.util import find_spec; \
  print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $(1)); test -z "$$lacks" || { \
  echo "make: $(PYTHON) lacks $$lacks; install with: $(PYTHON) -m pip install -e '.$(2)'; or leave out VENV=" >&2; exit 1; }
endef

has-run-modules:
	$(NEW_ENOUGH)
	$(call HAS_MODULES,$(RUN_MODULES))

has-test-modules:
	$(NEW_ENOUGH)
	$(call HAS_MODULES,$(TEST_MODULES),[dev])

# A machine lent for its GPU need not have the linters.
has-gpu-test-modules:
	$(NEW_ENOUGH)
	$(call HAS_MODULES,$(RUN_MODULES) pytest,[dev])

ifneq ($(strip $(VENV)),)
$(VENV)/bin/python:
	$(NEW_ENOUGH)
	@$(PYTHON) -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo "make: no virtual environment could be made; Debian and Ubuntu need: apt install python3-venv" >&2; exit 1; }

$(RUN_READY): WITH := $(RUN_EXTRAS)
$(TRAIN_READY): WITH := $(TRAIN_EXTRAS)
$(TEST_READY): WITH := $(TEST_EXTRAS)
$(RUN_READY) $(TRAIN_READY) $(TEST_READY): pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) with kbench$(WITH)" >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.$(WITH)' || { \
	  echo "make: pip could not install kbench$(WITH), its message is above: check the network, or use an interpreter" >&2; \
	  echo "      that has the packages already: make $(firstword $(MAKECMDGOALS)) PYTHON=python3 VENV=" >&2; exit 1; }
	@touch $@

$(VENV)-cuda12/.ready: pyproject.toml
	@$(PYTHON) -m venv "$(VENV)-cuda12"
	@$(VENV)-cuda12/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,nvrtc12]' \
	  'cupy-cuda12x>=14.2' 'nvmath-python>=1.0'
	@touch $@
endif
