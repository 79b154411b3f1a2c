# make demo       two runs of SuPerFed on the bundled images (one to six minutes), and the pages
# make compare    all 23 methods on the bundled images, three seeds: a table and two figures
# make benchmark  all methods on CIFAR-10, each with chosen settings; hours, what is there stays
# make reproduce  every table and figure of the papers; ARGS="--only superfed-1 --seeds 3"
# make again      reproduces one committed result; RECORD=results/.../0.json ARGS="--rounds 20"
# make docs       docs/*.html: each paper's pseudocode beside its code
# make bench      seconds per round against a plain PyTorch loop; wants a quiet machine
# make gpu-check  four minutes on a CUDA GPU: every algorithm's fast way against the plain loop
# make authors CLONES=folder    our numbers beside those of the authors' programs (results/authors.md)
# make test       linter and tests (no network but for the first set-up, no GPU needed)
# make test-all   also the few tests that take long: large networks, simulated comparisons
# make lint       the linter alone
# A fresh machine needs nothing but Python 3.10 or later: .venv is made from requirements.txt.

PYTHON = .venv/bin/python

demo: .venv/ready docs
	$(PYTHON) superfed.py --dataset shapes --mix model --plot --out runs/demo-model
	$(PYTHON) superfed.py --dataset shapes --mix layer --plot --out runs/demo-layer
	@echo "page    file://$(CURDIR)/docs/index.html: each paper's pseudocode beside its code"

compare: .venv/ready
	$(PYTHON) compare.py --methods all --jobs 2

benchmark: .venv/ready
	$(PYTHON) compare.py --benchmark --jobs 2

reproduce: .venv/ready
	$(PYTHON) -m papers $(ARGS)

again: .venv/ready
	$(PYTHON) -m papers --again $(RECORD) $(ARGS)

docs: .venv/ready
	$(PYTHON) docs/build.py

bench: .venv/ready
	$(PYTHON) checks/bench.py

gpu-check: .venv/ready
	$(PYTHON) checks/gpu_check.py

authors: .venv/ready
	$(PYTHON) checks/authors/everything.py $(CLONES)

lint: .venv/ready
	.venv/bin/ruff check .

test: lint
	$(PYTHON) -m pytest

test-all: lint
	$(PYTHON) -m pytest -m "slow or not slow"

.venv/ready: requirements.txt pyproject.toml
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet -r requirements.txt
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	touch .venv/ready

.PHONY: demo compare benchmark reproduce again docs bench gpu-check authors lint test test-all
