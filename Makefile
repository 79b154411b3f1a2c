# make demo    two runs of SuPerFed on the embedded data set, one to three minutes each, with tables and plots
# make bench   seconds per round against a plain PyTorch loop; wants a quiet machine (about ten minutes on two cores)
# make compare all 23 methods on the embedded data set, three seeds: a table and two figures, in runs/compare
# make reproduce        every table and figure of the papers; ARGS="--only superfed-1 --seeds 3 --budget 2h"
# make reproduce-quick  who beats whom, on the embedded data set (22 minutes beside other work)
# make authors CLONES=folder   our numbers beside those of the authors' own programs (two minutes; docs/authors.md)
# make docs    docs/*.html: each paper's pseudocode beside its code, made from the files and docs/*.md
# make test    all tests (no network but for the first set-up, no GPU needed)
# A fresh machine needs nothing but Python 3.10 or later: .venv is made from requirements.txt.

PYTHON = .venv/bin/python

demo: .venv/ready
	$(PYTHON) superfed.py --dataset shapes --mix model --plot --out runs/demo-model
	$(PYTHON) superfed.py --dataset shapes --mix layer --plot --out runs/demo-layer

bench: .venv/ready
	$(PYTHON) tests/bench.py

compare: .venv/ready
	$(PYTHON) compare.py --methods all --jobs 2

reproduce: .venv/ready
	$(PYTHON) reproduce.py $(ARGS)

reproduce-quick: .venv/ready
	$(PYTHON) reproduce.py --quick

authors: .venv/ready
	$(PYTHON) tests/authors/everything.py $(CLONES)

docs: .venv/ready
	$(PYTHON) docs/build.py

test: .venv/ready
	$(PYTHON) -m pytest -q -o tmp_path_retention_policy=failed tests

.venv/ready: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet -r requirements.txt
	touch .venv/ready

.PHONY: demo bench compare reproduce reproduce-quick authors docs test
