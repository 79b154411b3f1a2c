"""What the files say of themselves: pseudocode tags, deviations, commands, numbers, lengths."""

import functools
import inspect
import itertools
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

import baselines
import common
import compare
import fedavg
import reproduce

HERE = pathlib.Path(fedavg.__file__).parent
ALGORITHMS = ["fedavg", "fedavgm", "superfed", "psinet", "fedslr", "persfl"]


def parts(name):
    """(docstring, code) of a file."""
    _, doc, code = (HERE / f"{name}.py").read_text().split('"""', 2)
    return doc, code


LISTINGS = {name: parts(name) for name in ALGORITHMS}
LISTINGS |= {method.__name__: inspect.getsource(method).split('"""', 2)[1:] for method in baselines.METHODS.values()}


@pytest.mark.parametrize("name", LISTINGS)
def test_every_line_of_the_pseudocode_is_cited_and_every_citation_exists(name):
    doc, code = LISTINGS[name]
    lines = {int(number) for number in re.findall(r"^ {4,5}(\d{1,2})  ", doc, re.M)}
    assert lines == set(range(1, max(lines) + 1))
    cited = set()
    for comment in re.findall(r"#(.*)", code):
        for group in re.findall(r"l\.(\d+(?:-\d+)?)", comment):
            a, _, b = group.partition("-")
            cited |= set(range(int(a), int(b or a) + 1))
    assert cited == lines


@pytest.mark.parametrize("name", LISTINGS)
def test_every_deviation_is_cited_where_it_happens(name):
    doc, code = LISTINGS[name]
    listed = set(re.findall(r"^    (D\d+)  ", doc, re.M))
    assert listed == {f"D{i + 1}" for i in range(len(listed))}
    assert set(re.findall(r"\bD\d+\b", "\n".join(re.findall(r"#.*", code)))) == listed


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_main_loop_fits_on_a_screen_and_the_file_in_400_lines(name):
    text = (HERE / f"{name}.py").read_text()
    assert text.count("\n") <= 400
    assert max(map(len, text.splitlines())) <= 128
    main = text[text.index("def main(") :]
    assert main.count("\n") <= 55


@functools.cache
def pages():
    """README.md and results/MEASURED.md, with links from the top."""
    return (HERE / "README.md").read_text() + (HERE / "results" / "MEASURED.md").read_text().replace("](", "](results/")


def test_methods_of_federation_that_texts_name_exist():
    texts = "\n".join(path.read_text() for path in (*HERE.glob("*.py"), *HERE.glob("*.md")))
    named = set(re.findall(r"\bFederation\.(\w+)", texts))
    assert len(named) > 2 and all(hasattr(common.Federation, name) for name in named)


def commands():
    """Every `python NAME.py ...` in the pages and the docstrings."""
    texts = [pages()] + [parts(name)[0] for name in (*ALGORITHMS, "baselines")]
    found = re.findall(r"^(?: {4}|\| `|`)?python (\w+)\.py ?([^`\n|#(]*)", "\n".join(texts), re.M)
    return sorted({(name, " ".join(argv.split())) for name, argv in found})


@pytest.mark.parametrize("name, argv", commands())
def test_commands_in_the_text_parse(name, argv, monkeypatch):
    """Up to the point where data would be read."""
    if name == "reproduce":
        for work in ("show", "reproduce", "rebuild", "quick", "measure", "accept"):
            monkeypatch.setattr(reproduce, work, lambda *_: 0)
        assert reproduce.main(shlex.split(argv)) == 0
    else:
        assert reproduce.arguments(f"{name}.py {argv}")


def quotable(path):
    """Accuracies that a docstring may quote from a result.json."""
    record = json.loads((HERE / path).read_text())
    assert len(record["rounds"]) == record["args"]["rounds"] and record["status"] == "finished"
    known = set()
    for when in ("final", "best"):
        for part in (*record[when].values(), *record["rounds"][-1].values()):
            if isinstance(part, dict):
                known |= {f"{part[name]:.4f}" for name in ("top1", "mean") if name in part}
    return known


def training(record):
    return f"{sum(row['seconds'] for row in record['rounds']) / 60:.0f} min"


def measure(when, part, name):
    of = {"final": reproduce.reading.final, "best": lambda record: record["best"]}[when]
    return lambda record: f"{of(record)[part][name]:.4f}"


# What stands in a column of the pages' tables, by the column's title
COLUMNS = {
    "minutes": training, "minutes of training": training, "s/round": lambda record: f"{record['seconds_per_round']:.1f} s",
    "rounds": lambda record: str(len(record["rounds"])), "global, last": measure("final", "global", "top1"),
    "global, best": measure("best", "global", "top1"), "by training images": measure("final", "personal", "mean"),
    "by test images": measure("final", "personal@test", "mean"), ".5": measure("final", "personal@lambda=0.5", "mean"),
    "0": measure("final", "personal@lambda=0", "mean"), "mixed, or a client's own": measure("final", "personal", "mean"),
    "GKR, or a global model": lambda record: measure("final", "gkr" if "gkr" in record["final"] else "personal", "mean")(record),
}


def test_the_table_of_settings_is_that_of_the_defaults():
    columns = {"clients": "clients", "model": "model", "rounds": "rounds", "E": "epochs", "B": "batch_size", "eta": "lr",
               "momentum": "momentum", "weight decay": "weight_decay"}
    lines = (HERE / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| command | split |"))
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    assert {row[0].split()[1][:-3] for row in rows} == {*ALGORITHMS, "baselines"}
    for row in rows:
        args, row = reproduce.arguments(row[0].strip("`").removeprefix("python ")), dict(zip(titles, row))
        assert {title: row[title] for title in columns} == {title: str(args[name]).removesuffix(".0")
                                                            for title, name in columns.items()}, row
        size = args["alpha"] if args["split"] in ("dirichlet", "fedslr") else args["per_client"]
        assert row["split"] == f"{args['split']}, {size}" and int(row["in a round"]) == args["fraction"] * args["clients"]


def test_numbers_in_the_pages_are_those_of_the_committed_results():
    """Every table row that links to a result.json; a cell may be empty."""
    found, titles = [], None
    for line in pages().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or "---" in line:
            continue
        link = re.search(r"\(([^)]*/result\.json)\)", line)
        if not link:
            titles = cells
            continue
        record = json.loads((HERE / link.group(1)).read_text())
        assert record["status"] == "finished" and len(record["rounds"]) == record["args"]["rounds"]
        checked = {title: cell for title, cell in zip(titles, cells, strict=True) if title in COLUMNS and cell}
        assert checked == {title: COLUMNS[title](record) for title in checked}, line
        found += [title for title in checked if "minutes" not in title]
    assert set(COLUMNS) - {"minutes", "minutes of training"} == set(found)


def test_persfls_tables_are_those_of_their_records():
    """Means over users and runs: FedAvg, fine-tuned and PersFL in per cent, T, lambda; behind +- the spread over users."""
    rows = re.findall(r"^\| \[.*\]\((results/persfl-.*)\) \|(.*)\|$", pages(), re.M)
    assert len(rows) == 9
    for folder, numbers in rows:
        users = [json.loads(path.read_text())["final"]["users"] for path in (HERE / folder).rglob("result.json")]
        runs, *cells = [list(map(float, cell.split("+-"))) for cell in numbers.split("|")]
        assert runs == [len(users)]
        for name, cell in zip(("FedAvg", "fine-tuned", "PersFL", "T", "lambda"), [cells[0], *cells[2:4], *cells[5::2]]):
            mean = np.mean([run[name] for run in users], 0) * (1 if name in ("T", "lambda") else 100)
            want = [round(mean.mean(), 3 if name == "lambda" else 1), round(mean.std(ddof=1), 1)]
            assert cell == want[: len(cell)], (folder, name)


def test_the_table_of_all_methods_is_that_of_its_record():
    rows = json.loads((HERE / "results" / "compare.json").read_text())["rows"]
    assert {row["method"].split()[0] for row in rows} == set(compare.METHODS)
    assert "\n".join(compare.lines(rows)) in pages()


@pytest.mark.parametrize("name", compare.METHODS)
def test_the_commands_of_the_comparison_parse(name, monkeypatch):
    file, *own = compare.METHODS[name].split()
    test_commands_in_the_text_parse(file, " ".join([*own, compare.SAME, compare.MORE.get(name, "")]), monkeypatch)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_in_the_docstrings_are_those_of_the_committed_results(name):
    """Four digits behind the name of a folder under results/, on its line or the next, are from its record."""
    found = re.findall(r"(results/[\w./-]+\w):\s+(.*)", parts(name)[0])
    assert found
    for path, rest in found:
        quoted = re.findall(r"0\.\d{4}", rest)
        assert quoted and set(quoted) <= quotable(f"{path}/result.json")
