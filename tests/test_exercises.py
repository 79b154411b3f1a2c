"""The exercises of docs/*.md beside checks/exercises.py, which runs them, and its record."""

import json
import re
import shlex

import exercises
import pytest

from papers import runs

pytestmark = pytest.mark.pages
KNOWN = exercises.exercises()
RECORD = json.loads(exercises.RECORD.read_text())


def test_those_with_commands_are_those_that_the_script_knows():
    checks = {
        name.replace("_", "-") for name in vars(exercises) if re.fullmatch(r"[a-z]{2,}_\d", name)
    }
    assert {name for name, exercise in KNOWN.items() if exercise.runs} == checks == set(RECORD)


@pytest.mark.parametrize("name", RECORD)
def test_the_pages_show_what_the_script_measured(name):
    record = RECORD[name]
    assert record["runs"] == [
        [command, change and list(change)] for command, change in KNOWN[name].runs
    ]
    assert list(record["holds"].values()) == [True] * len(exercises.SEEDS)
    assert f"\n\n{exercises.table(record['numbers'])}\n\n</details>" in KNOWN[name].text


@pytest.mark.parametrize("name", RECORD)
def test_commands_parse_and_changed_lines_are_there(name):
    for command, change in KNOWN[name].runs:
        assert runs.arguments(command.removeprefix("python "))["dataset"] == "shapes"
        if change:
            assert (exercises.HERE / shlex.split(command)[1]).read_text().count(change[0]) == 1
