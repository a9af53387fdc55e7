# All commands but test-versions need Python 3.11 or newer, pip and make, and set up .venv by themselves:
#   make demo     train a 50-layer perceptron with Nero, SGD, Adam and LAMB, and draw the curves
#   make test     run the checks of format, lint, types and imports, then all tests
#   make coverage  run all tests and require 95 % branch coverage
#   make test-versions  run the core's tests on the oldest and the newest torch, each in its own environment
#   make test-models  test the roles of models of timm, torchvision and diffusers, in .venv-models
#   make package  build sdist and wheel in dist, check them, and try each in an environment of its own
#   make format   fix format and lint where a machine can
#   make bench    time Nero beside other optimisers, on a GPU if there is one, and draw the times
#   make docs     fill the cost tables and file trees of the pages, and build the site in out/site
#   make docs-serve  build the site and show it on this machine
#   make paper    pack new records in results/, draw figures and fill tables of the paper's tasks and the studies
#   make figures  train the networks of watch.png, gains.png and sphere.gif in docs/figures again, and draw them
#   make clean    remove environments, dist and out
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PORT ?= 8000

# The oldest and the newest torch, each with a Python that it supports. pip may find only builds for CUDA, of gigabytes.
PYTHON_oldest ?= python3.10
TORCH_oldest ?= 2.8.0
PYTHON_newest ?= $(PYTHON)
TORCH_newest ?= 2.15.0

# the tests start about a hundred processes, and each would compile all modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage test-models test-versions test-oldest test-newest format bench docs docs-serve paper figures clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest --numprocesses 3

coverage: $(READY)
	$(BIN)/pytest --numprocesses 3 --cov --cov-report=term-missing

test-versions:
	$(MAKE) --keep-going test-oldest test-newest

test-oldest test-newest: test-%: .venv-%/ready
	.venv-$*/bin/python -c "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
	.venv-$*/bin/pytest --quiet --numprocesses 2 tests/core tests/backends tests/auto

test-models: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
		diffusers==0.42.1 timm==1.0.30 transformers hypothesis pytest pytest-cov
	.venv-models/bin/python -m pytest tests/core/test_roles_libraries.py
	.venv-models/bin/python -m pytest tests/test_recipes.py -k timm

.PHONY: package
package: $(READY)
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	for file in $(CURDIR)/dist/*; do \
	    folder=$$(mktemp -d) && $(PYTHON) -m venv $$folder \
	    && $$folder/bin/python -m pip install --quiet --constraint constraints.txt $$file \
	    && (cd $$folder && bin/python -I $(CURDIR)/tests/smoke.py); \
	    failed=$$?; rm -rf $$folder; [ $$failed = 0 ] || exit 1; \
	done

bench: $(READY)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/balance_cost.py
	$(BIN)/python benchmarks/figure.py
	$(BIN)/python benchmarks/tables.py

docs: $(READY)
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python docs/tree.py
	$(BIN)/python -m sphinx -b html -j 2 -q -W --keep-going -d out/doctrees -c docs . out/site

docs-serve: docs
	@echo "the site is at http://127.0.0.1:$(PORT)/; Ctrl-C ends it"
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory out/site $(PORT)

paper: $(READY)
	$(BIN)/python -m nero_lab.report

figures: $(READY)
	$(BIN)/python examples/watch.py --out docs/figures
	$(BIN)/python examples/gains.py --out docs/figures
	$(BIN)/python examples/sphere.py --out docs/figures

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-models .venv-oldest .venv-newest dist out

$(READY): EXTRAS := dev
.venv/demo: EXTRAS := cpu,demo
$(READY) .venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

.venv-%/ready: pyproject.toml
	@$(PYTHON_$*) --version || { echo "no $(PYTHON_$*) here: name another by PYTHON_$*=..."; exit 1; }
	$(PYTHON_$*) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --editable '.[test]' torch==$(TORCH_$*) \
	    || { echo "pip finds no torch $(TORCH_$*) for $(PYTHON_$*): name another by TORCH_$*=..."; exit 1; }
	touch $@
