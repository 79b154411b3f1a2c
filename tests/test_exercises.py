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


def test_each_page_has_exercises_numbered_from_1():
    for page in exercises.PAGES:
        names = [name for name in KNOWN if name.startswith(f"{page}-")]
        assert 3 <= len(names) <= 5 and names == [f"{page}-{i + 1}" for i in range(len(names))]
        text = (exercises.HERE / "docs" / f"{page}.md").read_text()
        assert re.findall(r"^## (.*)", text, re.M)[-2:] == ["Exercises", "The choices"]


@pytest.mark.parametrize("name", KNOWN)
def test_form(name):
    """A task, a prediction, the commands, and the answer behind a fold, whose inside is Markdown:
    an empty line before and after it."""
    text = KNOWN[name].text
    assert text.count("\nPredict first: ") == 1
    assert re.search(r"\n\n<details><summary>Answer</summary>\n\n(?:.|\n)+\n\n</details>\n$", text)
    assert text.index("Predict first") < text.index(
        "    python " if KNOWN[name].runs else "<details>"
    )


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
