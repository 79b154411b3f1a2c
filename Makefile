# make demo    about two minutes of SuPerFed on the embedded data set, with tables and plots
# make bench   seconds per round against a plain PyTorch loop; wants a quiet machine (20 minutes on two cores)
# make test    all tests (no network but for the first set-up, no GPU needed)
# A fresh machine needs nothing but Python 3.10 or later: .venv is made from requirements.txt.

PYTHON = .venv/bin/python

demo: .venv/ready
	$(PYTHON) superfed.py --dataset shapes --mix model --plot --out runs/demo-model
	$(PYTHON) superfed.py --dataset shapes --mix layer --plot --out runs/demo-layer

bench: .venv/ready
	$(PYTHON) tests/bench.py

test: .venv/ready
	$(PYTHON) -m pytest -q tests

.venv/ready: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet -r requirements.txt
	touch .venv/ready

.PHONY: demo bench test
