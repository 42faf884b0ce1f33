# Everything a newcomer needs: `make train`, `make test`. Set-up happens on the way, in .venv (and .venv-py311),
# once; pyproject.toml or this file changing makes it happen again.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

TORCH := torch==2.13.0
MEGATRON := megatron-core==0.19.2
MEGATRON_311 := megatron-core==0.16.1
ARGS ?=

VENV := .venv/ready
VENV_311 := .venv-py311/ready
VENV_DOCS := .venv-docs/ready
RUN := .venv/bin/python -W ignore
PIP := -m pip install --quiet --disable-pip-version-check

export OMP_NUM_THREADS ?= 1

.PHONY: help train finetune compare test test-plan test-bench test-all faults soak tables docs lint style types bench bench-masks bench-loss bench-recompute bench-step bench-topology compiled gpu-smoke gpu-tests gpu-figures gpu-check gpu-sanitize clean

help:
	@echo 'make train [ARGS="..."]    train a GPT on Megatron-Core with a burst ring (4 CPU processes)'
	@echo 'make compare [ARGS="..."]  the same training on 1 process and on a ring of 4: must agree'
	@echo 'make finetune              train a small Llama by DeepSpeed (ZeRO-3, SP 4; ZeRO-2, DP 2 x SP 2), then FSDP2 (DP 2 x CP 2)'
	@echo 'make test                  lint, types and the tests of burst_mcore; also with Megatron-Core 0.16.1 where'
	@echo '                           Python 3.11 is'
	@echo 'make test-plan, test-bench  the tests of burst_plan, of burst_bench'
	@echo 'make test-all              all tests, and the slow cells'
	@echo 'make faults                 plant every fault of tests/faults, and fail if its test does not find it'
	@echo 'make soak HOURS=12         four ranks for hours: calls, trainings, ranks that die; SEED=0 STEP=17 makes one step again'
	@echo 'make tables                write the tables and pictures of the docs again, after a setting or a schedule changed'
	@echo 'make docs                  build the manual as a site: open site/index.html'
	@echo 'make bench                 attention, compared with other methods'
	@echo 'make bench-SUBJECT         masks, loss, recompute, step, or topology (needs root and iproute2)'
	@echo 'make compiled              compile our Triton kernels for GPUs, and write benchmarks/compiled.json (needs none)'
	@echo 'make gpu-smoke             two minutes on a GPU: kernels, a ring, messages (needs torch, triton, pytest; no'
	@echo '                           environment is made)'
	@echo 'make gpu-tests             the tests that need a GPU'
	@echo 'make gpu-figures           what was predicted of a GPU, measured; ARGS=--part=N for one of four parts'
	@echo 'make gpu-check             all three in turn'

train: $(VENV)
	@$(RUN) examples/train.py $(ARGS)

compare: $(VENV)
	@$(RUN) examples/compare.py $(ARGS)

finetune: $(VENV)
	@for way in zero3_sp4 zero2_dp2_sp2; do
	  $(RUN) examples/finetune_hf.py --config examples/deepspeed/$$way.json --out runs/finetune/$$way --goal 2.8 $(ARGS)
	done
	$(RUN) examples/finetune_fsdp.py --cp 2 --out runs/finetune/fsdp_dp2_cp2 --goal 2.8 $(ARGS)

PRODUCT := tests --ignore tests/plan --ignore tests/bench

test: lint
	@$(call tested,$(PRODUCT),not slow)
	$(call test_311,tests/megatron,not slow)

test-plan: $(VENV)
	@$(call tested,tests/plan,not slow)
	$(call test_311,tests/plan/test_memory_of_megatron.py tests/plan/test_patches.py,not slow)

test-bench: $(VENV)
	@$(call tested,tests/bench,not slow)

test-all: lint
	@$(call tested,tests,slow or not slow)
	$(call test_311,tests/megatron tests/plan/test_memory_of_megatron.py tests/plan/test_patches.py,slow or not slow)

faults: $(VENV)
	@.venv/bin/python tests/faults/plant.py $(ARGS)

soak: $(VENV)
	@PYTHONPATH=.:tests/helpers:tests/rings:tests/recompute:tests/torch:tests/recurrent $(RUN) tests/soak/soak.py --hours $(or $(HOURS),12) --seed $(or $(SEED),0) $(if $(STEP),--step $(STEP)) $(ARGS)

tables: $(VENV)
	@PYTHONPATH=. $(RUN) docs/scripts/tables.py
	PYTHONPATH=. $(RUN) docs/scripts/pictures.py
	PYTHONPATH=. $(RUN) docs/scripts/scenarios.py

docs: $(VENV_DOCS) $(VENV)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet $(ARGS)
	echo 'the manual: site/index.html'

lint: $(VENV)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync style types

style: $(VENV)
	@.venv/bin/ruff check --quiet
	.venv/bin/ruff format --quiet --check

types: $(VENV)
	@.venv/bin/mypy --no-error-summary

bench: $(VENV)
	@.venv/bin/burst-mcore bench attention --out runs/attention.json $(ARGS)

bench-masks: subject-masks
bench-loss: subject-loss
bench-recompute: subject-recompute
bench-step: subject-step
bench-topology: subject-topology

subject-%: $(VENV)
	@.venv/bin/burst-mcore bench $* --out benchmarks/results/$*.json $(ARGS)

GPU = python3 -c 'import torch, triton, pytest, sys; sys.exit(not torch.cuda.is_available())' && command -v "$${CC:-cc}" >/dev/null || { echo 'this needs a GPU, a python3 with torch, triton and pytest, and a C compiler (for triton)'; exit 1; }

gpu-smoke:
	@$(GPU)
	python3 -m burst_bench.check smoke $(ARGS)

gpu-tests:
	@$(GPU)
	PYTHONPATH=. python3 -m pytest -q --durations=20 tests/gpu $(ARGS)

gpu-figures:
	@$(GPU)
	python3 -m burst_bench.check figures $(ARGS)

gpu-check:
	@$(GPU)
	worst=0
	python3 -m burst_bench.check smoke || worst=$$?
	PYTHONPATH=. python3 -m pytest -q --durations=20 tests/gpu || worst=$$?
	python3 -m burst_bench.check figures $(ARGS) || worst=$$?
	exit $$worst

compiled: $(VENV)
	@TRITON_INTERPRET=0 PYTHONPATH=.:tests/helpers .venv/bin/python tests/kernels/compiled.py

gpu-sanitize:
	PYTHONPATH=. compute-sanitizer --tool memcheck python3 -m pytest -q tests/gpu -k 'pattern or fused or virtual'

clean:
	rm -rf .venv .venv-py311 .venv-docs site runs

# Runs tests of $(1) that are $(2), on all cores up to 8: many start processes of their own.
define tested
.venv/bin/python -m pytest $(1) -m '$(2)' --numprocesses auto --maxprocesses 8 --dist loadfile
endef

# Runs tests of $(1) that are $(2) in the second environment, or says why not.
define test_311
if [ -n "$$($(call python,11,))" ]; then
  $(MAKE) --no-print-directory $(VENV_311)
  .venv-py311/bin/python -m pytest $(1) -m '$(2)'
else
  echo 'no Python 3.11 here: not tested with $(MEGATRON_311), the last Megatron-Core for it'
fi
endef

# Prints the first interpreter that really runs (a shim may exist and fail) and is a Python 3.$(1) (or 3.$(2))
# that can make environments.
define python
for candidate in "$${PYTHON:-}" $(foreach minor,$(1) $(2),python3.$(minor)) \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.{$(1),$(or $(2),$(1))}.*/bin/python python3; do
  if [ -n "$$candidate" ] && "$$candidate" -c 'import ensurepip, sys, venv; \
      sys.exit(sys.version_info[:2] not in [(3, int(m)) for m in "$(1) $(2)".split()])' >/dev/null 2>&1; then
    echo "$$candidate"
    break
  fi
done
endef

# Waits while another make sets up here, and leaves if that has made the environment. The lock is of this shell's
# file 9, which Python is given.
define one_at_a_time
exec 9<pyproject.toml
"$$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
if [ $@ -nt pyproject.toml ] && [ $@ -nt Makefile ]; then exit 0; fi
endef

$(VENV): pyproject.toml Makefile
	@python="$$($(call python,12,13))"
	if [ -z "$$python" ]; then
	  echo 'burst_mcore needs Python 3.12 or 3.13 with venv: install one (Debian: apt install python3-venv; or pyenv install 3.12), or name it: make PYTHON=/path/to/python3.12' >&2
	  exit 1
	fi
	echo "setting up .venv with $$("$$python" --version) ($$python); the first time takes some minutes"
	$(one_at_a_time)
	.venv/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv
	.venv/bin/python $(PIP) $(TORCH) $(MEGATRON) -e '.[megatron,bench,huggingface,deepspeed,test]'
	touch $@

$(VENV_311): pyproject.toml Makefile
	@python="$$($(call python,11,))"
	echo "setting up .venv-py311 with $$("$$python" --version) ($$python)"
	$(one_at_a_time)
	.venv-py311/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv-py311
	.venv-py311/bin/python $(PIP) $(TORCH) $(MEGATRON_311) -e '.[megatron,test]'
	touch $@

# The manual's tools alone; docs/scripts/manual.py asks .venv for the predictions of all rows.
$(VENV_DOCS): pyproject.toml Makefile
	@python="$$($(call python,12,13))"
	if [ -z "$$python" ]; then
	  echo 'make docs needs Python 3.12 or 3.13 with venv, or its name: make docs PYTHON=/path/to/python3.12' >&2
	  exit 1
	fi
	$(one_at_a_time)
	.venv-docs/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv-docs
	.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/needs
	.venv-docs/bin/python $(PIP) -r .venv-docs/needs
	touch $@
