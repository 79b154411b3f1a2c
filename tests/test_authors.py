"""What checks/authors has recorded, and README and results/authors.md beside it. The scripts run
by hand, beside the authors' programs, but for the one that compares with PyTorch."""

import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "checks" / "authors"))

import check
import everything

pytestmark = pytest.mark.pages
RECORD = json.loads((ROOT / "results" / "authors.json").read_text())


def test_every_difference_of_the_record_is_rounding_or_has_its_choice():
    lines = [line for part in RECORD["scripts"].values() for line in part["lines"]]
    assert lines and all(map(check.sound, lines))
    for line in lines:
        if line["because"]:
            name, *choices = line["because"].replace(",", "").split()
            page, own = (name, "") if (ROOT / f"{name}.py").exists() else ("baselines", f"{name} ")
            text = (ROOT / "docs" / f"{page}.md").read_text()
            assert choices and all(re.search(rf"^### {own}.*\b{choice}\b", text, re.M)
                                   for choice in choices), line["because"]


def test_the_readme_quotes_the_record():
    text = " ".join((ROOT / "README.md").read_text().split())
    for name, title in (("superfed", "SuPerFed"), ("fedslr", "FedSLR"), ("pfedme", "pFedMe")):
        lines = RECORD["scripts"][name]["lines"]
        largest = max(line["difference"] for line in lines if not line["because"])
        assert f"{largest:.0e} for {title}" in text


def test_the_page_is_made_from_the_record():
    assert (ROOT / "results" / "authors.md").read_text() == everything.page(RECORD)


def test_every_script_is_in_the_record():
    for name in check.SCRIPTS:
        script, part = check.script(name), RECORD["scripts"][name]
        assert [script.REPOSITORY, list(script.COMMITS)] == [part["repository"], part["commits"]]
    assert set(check.SCRIPTS) == set(RECORD["scripts"])


def test_the_script_that_needs_no_clone_finds_what_is_recorded():
    lines, recorded = (check.compared(check.script("torch_sgd"), None),
                       RECORD["scripts"]["torch_sgd"]["lines"])
    assert [line["what"] for line in lines] == [line["what"] for line in recorded]
    assert all(map(check.sound, lines))
