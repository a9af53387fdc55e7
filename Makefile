# Five commands do everything on a machine with Python 3.11 or newer, pip and make:
#   make demo    train a 50-layer perceptron with Nero, SGD, Adam and LAMB, and draw the curves
#   make test    format, lint, types, arrows, all tests
#   make bench   time Nero beside other optimisers, on a GPU if there is one, and draw it
#   make paper   draw the paper's figures and fill its tables in docs/paper and README.md from the committed records
#   make figures train the networks of docs/figures/watch.png and gains.png anew, and draw them
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test bench paper figures format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest --numprocesses 2 --cov --cov-report=term-missing

bench: $(READY)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/figure.py

paper: $(READY)
	$(BIN)/nero report --records results --out docs/paper
	$(BIN)/python -m nero_lab.report results README.md

figures: $(READY)
	$(BIN)/python examples/watch.py --out docs/figures
	$(BIN)/python examples/gains.py --out docs/figures

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
