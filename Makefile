# make demo, make test: the two commands of the README. Everything is installed into .venv from requirements-dev.lock.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TESTS := tests/unit tests/component tests/property tests/console tests/integration
PYTEST := $(BIN)/python -m pytest --durations 10
# tests/conftest.py says which worker runs what
TWO_WORKERS := --numprocesses 2 --dist loadscope
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-pythons chaos durations unit compiled check docs bench soak pictures lock release clean

demo: $(INSTALLED)
	$(BIN)/raymq demo

# All tests without the mark `long`. Property tests have at most 40 examples here, and all examples in make soak.
test: compiled
	RAYMQ_QUICK=1 $(PYTEST) $(TWO_WORKERS) -m "not long" $(TESTS)

# The unit and component tests and the demo on each Python that raymq supports and this machine has, each in an
# environment of its own (build/venv-3.12): make test-pythons PYTHONS="3.12 3.13"
PYTHONS ?= 3.11 3.12 3.13
test-pythons: $(INSTALLED)
	$(BIN)/python -m tests.pythons $(PYTHONS)

# The tests of faults in tests/chaos, and the tests elsewhere with the mark `long`. Each commit runs a third of the files in
# tests/rotation.py; RAYMQ_ROTATION=all runs all of them, RAYMQ_ROTATION=0, 1 or 2 one third.
LONG = $(shell grep --recursive --files-with-matches --include="test_*.py" "pytest.mark.long" $(TESTS))
chaos: compiled
	RAYMQ_ROTATION=$${RAYMQ_ROTATION:-commit} $(PYTEST) $(TWO_WORKERS) -m long tests/chaos $(LONG)

# How long each scope of tests takes, into tests/durations.json, by which make test and make chaos order them.
durations: compiled
	RAYMQ_QUICK=1 $(PYTEST) $(TWO_WORKERS) --record-durations $(TESTS) tests/chaos

# The same as make chaos with many more rounds and seeds. Files elsewhere that name RAYMQ_SOAK or import rounds have long runs, too.
SOAKED = $(shell grep --recursive --files-with-matches --include="test_*.py" -e RAYMQ_SOAK -e "import .*rounds" $(TESTS))
soak: compiled
	RAYMQ_SOAK=1 $(PYTEST) --timeout 7200 tests/chaos tests/property $(filter-out tests/property/%,$(SOAKED))

unit: compiled
	$(PYTEST) tests/unit

# Tests start hundreds of processes. Each saves 0.4 s of processor time if it finds bytecode, which Python itself does not
# write where PYTHONDONTWRITEBYTECODE is set.
compiled: $(INSTALLED)
	$(BIN)/python -m compileall -q raymq storage actors placement raydp_jobs tests/support

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

# The site, in build/docs: every warning is an error, and so is a name or a link that leads nowhere. Every page is read anew
# (-E): the pages of commands and classes follow the code, which sphinx does not see change.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -b html -E -n -W --keep-going -q -c docs/site -d build/doctrees docs build/docs

# One table of everything, beside the peers that are installed (redis-server, nats-server); BENCH="--scale 0.1" is quick.
bench: $(INSTALLED)
	$(BIN)/python -m tests.bench --json bench.json $(BENCH)

# The pictures of the console in docs/pictures/; needs Chromium.
pictures: $(INSTALLED)
	$(BIN)/python -m tests.console.pictures

# PYTHON is Python 3.11, 3.12 or 3.13. A machine may call it just python3.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
$(INSTALLED): requirements-dev.lock pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -c '$(SUPPORTED)' 2> /dev/null || python3 -c '$(SUPPORTED)' \
		|| { echo "raymq needs Python 3.11, 3.12 or 3.13: install one, or run make PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(BIN)/python || { $(PYTHON) -c '$(SUPPORTED)' 2> /dev/null && $(PYTHON) -m venv $(VENV); } \
		|| python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(INSTALLED)

# Newest versions that pyproject.toml admits, for every Python that it admits; needs uv. Nodes of a cluster install
# requirements.lock, which has raymq's packages and those of its extras. requirements-dev.lock adds the development tools.
COMPILE := uv pip compile pyproject.toml --extra all --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links --upgrade
# The official Python client, which tests install into an environment of its own.
ROCKETMQ_CLIENT := rocketmq-python-client==5.1.2
lock:
	$(COMPILE) --output-file requirements.lock
	$(COMPILE) --extra demo --extra docs --extra dev --extra bench --constraint requirements.lock \
		--output-file requirements-dev.lock
	echo "$(ROCKETMQ_CLIENT)" | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --no-emit-find-links --upgrade --constraint requirements-dev.lock \
		--output-file tests/support/gateway/clients/requirements.txt

# The files of a release, in dist/, checked, installed in a fresh environment, with the demo run there. Publishes nothing.
release: $(INSTALLED)
	$(BIN)/python -m tests.release

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
