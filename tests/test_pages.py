"""What the files say of themselves: pseudocode tags, deviations, commands, numbers, lengths."""

import functools
import inspect
import itertools
import json
import pathlib
import re
import shlex
import sys

import exercises
import numpy as np
import pytest

import baselines
import common
import compare
import fedavg
from comparing import benchmark, planning
from docs.build import choices, pseudocode, tags
from fl import records
from papers import __main__ as reproduce
from papers import again, fedavg_how_often, reading, runs

HERE = pathlib.Path(fedavg.__file__).parent
sys.path.insert(0, str(HERE / "checks" / "authors"))
import check
import everything

pytestmark = pytest.mark.pages
ALGORITHMS = ["fedavg", "fedavgm", "superfed", "psinet", "fedslr", "persfl"]


def parts(name):
    """(docstring, code) of a file."""
    _, doc, code = (HERE / f"{name}.py").read_text().split('"""', 2)
    return doc, code


LISTINGS = {name: parts(name) for name in ALGORITHMS}
LISTINGS |= {method.__name__: inspect.getsource(method).split('"""', 2)[1:]
             for method in baselines.METHODS.values()}


@pytest.mark.parametrize("name", LISTINGS)
def test_every_line_of_the_pseudocode_is_cited_and_every_citation_exists(name):
    doc, code = LISTINGS[name]
    lines = [number for number, *_ in pseudocode(doc) if number]
    assert len(lines) == len(set(lines)) > 2 and tags(code) == set(lines)


@pytest.mark.parametrize("name", LISTINGS)
def test_every_choice_is_cited_where_it_is_made(name):
    doc, code = LISTINGS[name]
    cited = set(re.findall(r"\bD\d+\b", "\n".join(re.findall(r"#.*", code))))
    assert cited == set(choices(doc))


@pytest.mark.parametrize("name", [*ALGORITHMS, "baselines"])
def test_file_and_page_have_the_same_choices(name):
    """docs/NAME.md tells each D of the file in full, under a heading with its number. Choices that
    belong to no line of the listing are on the page alone; the file names them."""
    page = (HERE / "docs" / f"{name}.md").read_text()
    headings = re.findall(r"^##+ (?:([\w-]+) )?(D\d+):", page, re.M)
    files = ({"": LISTINGS[name][0]} if name in LISTINGS else
             {key: LISTINGS[method.__name__][0] for key, method in baselines.METHODS.items()})
    told = {(method, number) for method, number in headings}
    assert len(told) == len(headings)
    wanted = {(method, number) for method, doc in files.items() for number in choices(doc)}
    if name == "baselines":  # one function is also fedavg, fedavg-ft and fedprox-ft
        wanted = {(method, number) for method, number in wanted
                  if method not in ("fedavg", "fedavg-ft", "fedprox-ft")}
    if name in LISTINGS:
        doc = LISTINGS[name][0]
        wanted |= {("", D) for D in re.findall(r"\bD\d+\b", doc[: doc.index("    D1  ")])}
    assert told == wanted


WORDS = {"README": 1000, "baselines": 4500, **dict.fromkeys(ALGORITHMS, 2570), "fedavgm": 1800,
         "extend": 2000}


def test_no_page_is_too_long():
    """Words of each page, of all of docs/, and of README. A table's bars are no words."""
    texts = (HERE / "README.md", *(HERE / "docs").glob("*.md"))
    found = {path.stem: len(re.findall(r"\S*\w\S*", path.read_text())) for path in texts}
    assert {name: n for name, n in found.items() if n > WORDS.get(name, 1950)} == {}
    assert sum(found.values()) - found["README"] <= 27_000
    for path in (HERE / "results").glob("*.md"):
        assert path.stat().st_size <= 60_000, path


@functools.cache
def pages():
    """README.md and the pages in docs/, with links from the top."""
    docs = "".join(path.read_text() for path in sorted((HERE / "docs").glob("*.md")))
    return (HERE / "README.md").read_text() + docs.replace("](../", "](")


def test_methods_of_federation_that_texts_name_exist():
    texts = "\n".join(path.read_text() for path in (*HERE.glob("*.py"), *HERE.glob("*.md")))
    named = set(re.findall(r"\bFederation\.(\w+)", texts))
    assert named and all(hasattr(common.Federation, name) for name in named)


def commands():
    """Every `python NAME.py ...` in the pages and the docstrings."""
    texts = [pages()] + [parts(name)[0] for name in (*ALGORITHMS, "baselines")]
    text = re.sub(r" \\\n +", " ", "\n".join(texts))  # a command may go on in the next line
    found = re.findall(r"^(?: {4}|\| `|`)?python (?:-m )?(papers(?!\S)|\w+(?=\.py))(?:\.py)? ?"
                       r"([^`\n|#(]*)", text, re.M)
    # a remark stands behind two spaces
    return sorted({(name, " ".join(argv.split("  ")[0].split())) for name, argv in found})


@pytest.mark.parametrize("name, argv", commands())
def test_commands_in_the_text_parse(name, argv, monkeypatch):
    """Up to the point where data would be read."""
    argv = re.sub(r"--(?:model|split) path/to/\S+", "", argv)  # these stand for a reader's files
    if name == "papers":
        for module, work in ((reproduce, "show"), (reproduce, "reproduce"), (again, "repeat"),
                             (reproduce.pages, "rebuild")):
            monkeypatch.setattr(module, work, lambda *_: 0)
        assert reproduce.main(shlex.split(argv)) == 0
    elif argv.startswith("--benchmark"):
        assert benchmark.arguments(shlex.split(argv)[1:])
    elif name == "compare":
        monkeypatch.chdir(HERE)
        args, shared = compare.arguments(shlex.split(argv))
        assert compare.plan(args.methods, args.set, shared)
    else:
        assert runs.arguments(f"{name}.py {argv}")


def complete(record):
    whole = len(record["rounds"]) == record["args"]["rounds"] or reading.on_target(record)
    return whole and record["status"] == "finished"


def quotable(folder):
    """Rounds to a target and accuracies that a docstring may quote from a run's folder; of a folder
    with several seeds, their means."""
    one = records.at(HERE / folder)
    found = [records.read(path) for path in ([one] if one.exists() else
                                             (HERE / folder).glob("*.json"))]
    assert found and all(map(complete, found))
    known = {f"{z:.1f}" for z in found[0].get("rounds_to", {}).values() if z}
    for when in ("final", "best"):
        for key in {*found[0][when], *found[0]["rounds"][-1]}:
            parts = [record[when].get(key, record["rounds"][-1].get(key)) for record in found]
            if isinstance(parts[0], dict):
                known |= {f"{np.mean([part[name] for part in parts]):.4f}"
                          for name in ("top1", "mean") if name in parts[0]}
    return known


def training(record):
    return f"{sum(row['seconds'] for row in record['rounds']) / 60:.0f} min"


def measure(when, part, name):
    of = {"final": reading.final, "best": lambda record: record["best"]}[when]
    return lambda record: f"{of(record)[part][name]:.4f}"


def every(k):
    """Rounds until the target if only every k-th round had been measured: the mean, and the least
    and the most."""
    def cell(record):
        rounds = fedavg_how_often.every(k, min(record["args"]["target"]), record["rounds"])
        return f"{np.mean(rounds):.0f}" + (
            f" ({min(rounds):.0f} to {max(rounds):.0f})" if k > 1 else "")

    return cell


# What stands in a column of the pages' tables, by the column's title
COLUMNS = {
    "each round": every(1),
    "every 5th": every(5),
    "every 20th": every(20),
    "every 50th": every(50),
    "minutes": training,
    "minutes of training": training,
    "s/round": lambda record: f"{record['seconds_per_round']:.1f} s",
    "rounds until the target": lambda record: f"{max(record['rounds_to'].values()):.1f}",
    "rounds": lambda record: str(len(record["rounds"])),
    "global, last": measure("final", "global", "top1"),
    "final global": measure("final", "global", "top1"),
    "global, best": measure("best", "global", "top1"),
    "by training loss": measure("final", "personal", "mean"),
    "by training accuracy": lambda record: measure(  # superfed.py's own choice until 2026-11-21
        "final",
        "personal@train-accuracy" if "personal@train-accuracy" in record["final"] else "personal",
        "mean")(record),
    "personal, last": measure("final", "personal", "mean"),
    "by test images": measure("final", "personal@test", "mean"),
    ".5": measure("final", "personal@lambda=0.5", "mean"),
    "0": measure("final", "personal@lambda=0", "mean"),
    "mixed, or a client's own": measure("final", "personal", "mean"),
    "GKR, or a global model": lambda record: measure(
        "final", "gkr" if "gkr" in record["final"] else "personal", "mean")(record),
}


def test_the_table_of_settings_is_that_of_the_defaults():
    columns = {"clients": "clients", "model": "model", "rounds": "rounds", "E": "epochs",
               "B": "batch_size", "eta": "lr", "momentum": "momentum",
               "weight decay": "weight_decay", "pixels": "transform",
               "own test images": "client_test"}
    lines = (HERE / "docs" / "run.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| command | split |"))
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    assert {row[0].split()[1][:-3] for row in rows} == {*ALGORITHMS, "baselines"}
    for row in rows:
        args, row = (runs.arguments(row[0].strip("`").removeprefix("python ")),
                     dict(zip(titles, row)))
        assert {title: row[title] for title in columns} == {
            title: str(args[name]).removesuffix(".0") for title, name in columns.items()}, row
        size = args["alpha"] if args["split"] in ("dirichlet-hsu", "fedslr") else args["per_client"]
        assert (row["split"] == ("iid" if args["split"] == "iid" else f"{args['split']}, {size}")
                and int(row["in a round"]) == args["fraction"] * args["clients"])


# a number that is a link to its record
NUMBER = re.compile(r"\[(\d*\.\d[^\]]*)\]\((results/[^()]*/[^()]*\.json)\)")


def test_numbers_that_are_links_are_those_of_their_records():
    """The rounds until a target, the last accuracy, global or personal, or the last (and the
    best)."""
    found = NUMBER.findall(pages())
    assert len(found) > 40
    for text, path in found:
        record = records.read(HERE / path)
        last, best = (measure(when, "global", "top1")(record) for when in ("final", "best"))
        reached = [*(record.get("rounds_to") or {None: None}).values()]
        until = None if None in reached else COLUMNS["rounds until the target"](record)
        both, own = f"{float(last):.3f} ({float(best):.3f})", record["final"]["personal"]["mean"]
        assert complete(record), path
        mean = f"{own:.4f}"[1:], *(f"{100 * own + e:.1f}" for e in (-1e-9, 1e-9))  # a tie
        assert text in (until, last[1:], *mean, both.replace("0.", ".")), path


def test_numbers_in_the_pages_are_those_of_the_committed_results():
    """Every table row that links to a record; a cell may be empty."""
    found, titles = [], None
    for line in pages().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or "---" in line:
            continue
        link = re.search(r"\((results/[^()]*/[^()]*\.json)\)", line)
        if not link:
            titles = cells
        if not link or NUMBER.search(line):
            continue
        record = records.read(HERE / link.group(1))
        assert complete(record)
        checked = {title: cell for title, cell in zip(titles, cells, strict=True)
                   if title in COLUMNS and cell}
        assert checked == {title: COLUMNS[title](record) for title in checked}, line
        found += [title for title in checked if "minutes" not in title]
    assert set(COLUMNS) - {"minutes", "minutes of training"} == set(found)


def test_persfls_tables_are_those_of_their_records():
    """Means over users and runs: FedAvg, fine-tuned and PersFL in per cent, T, lambda; behind +-
    the spread over users."""
    rows = re.findall(
        r"^\| \[[^]]*\]\((results/(?:persfl-[23]/persfl-[\w-]+|persfl-normalize/mnist-DS-\d)"
        r"(?:\.json)?)\) \|(.*)\|$", pages(), re.M)
    assert len(rows) == 9
    for folder, numbers in rows:
        whole = HERE / folder
        paths = [whole] if whole.suffix else whole.glob("[0-9].json")
        users = [records.read(path)["final"]["users"] for path in paths]
        seeds, *cells = [list(map(float, cell.split("+-"))) for cell in numbers.split("|")]
        assert seeds == [len(users)]
        for name, cell in zip(("FedAvg", "fine-tuned", "PersFL", "T", "lambda"),
                              [cells[0], *cells[2:4], *cells[5::2]]):
            mean = np.mean([seed[name] for seed in users], 0) * (
                1 if name in ("T", "lambda") else 100)
            want = [round(mean.mean(), 3 if name == "lambda" else 1), round(mean.std(ddof=1), 1)]
            assert cell == want[: len(cell)], (folder, name)


def test_the_page_on_extending_shows_lines_of_the_file():
    page, file = ((HERE / "docs" / name).read_text() for name in ("extend.md", "lastlayer.py"))
    (shown,) = re.findall(r"(?:^    .*\n)+", page.partition("## A whole method")[2], re.M)
    assert shown in file


def test_what_methods_have_of_their_own_is_told():
    """docs/compare.md has a row for each of planning.OWN, with its reason and its settings for the
    defaults."""
    page = (HERE / "docs" / "compare.md").read_text()
    shared = compare.arguments(["--methods", "all"])[1]
    for name, (settings, why) in planning.OWN.items():
        assert f"| {name} | `{' '.join(compare.flags(settings(shared)))}` | {why} |" in page, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_in_the_docstrings_are_those_of_the_committed_results(name):
    """In the table of what to expect, a row ends with its record's folder under results/; its
    numbers of four digits, or with one digit behind the point, are from there."""
    rows = re.findall(r"^    (.*?) ([\w.-]+/[\w./-]+)$", parts(name)[0], re.M)
    common_folder = re.search(r"record \(in (results[\w./-]*)\)", parts(name)[0])
    assert rows
    for text, folder in rows:
        quoted = re.findall(r"(?<!\d)0?(\.\d{4})(?!\d)|(?<![\d.])(\d+\.\d)(?!\d)", text)
        quoted = ["".join(words) for words in quoted]
        folder = f"{common_folder.group(1)}/{folder}" if common_folder else folder
        assert quoted and set(quoted) <= {number.lstrip("0") for number in quotable(folder)}, folder


# The exercises, beside checks/exercises.py, which runs them, and its record

EXERCISES = exercises.exercises()
MEASURED = json.loads(exercises.RECORD.read_text())


def test_those_with_commands_are_those_that_the_script_knows():
    known = {name.replace("_", "-") for name in vars(exercises)
             if re.fullmatch(r"[a-z]{2,}_\d", name)}
    assert {name for name, one in EXERCISES.items() if one.runs} == known == set(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_the_pages_show_what_the_script_measured(name):
    record = MEASURED[name]
    assert record["runs"] == [
        [command, change and list(change)] for command, change in EXERCISES[name].runs
    ]
    assert list(record["holds"].values()) == [True] * len(exercises.SEEDS)
    assert f"\n\n{exercises.table(record['numbers'])}\n\n</details>" in EXERCISES[name].text


@pytest.mark.parametrize("name", MEASURED)
def test_commands_parse_and_changed_lines_are_there(name):
    for command, change in EXERCISES[name].runs:
        assert runs.arguments(command.removeprefix("python "))["dataset"] == "shapes"
        if change:
            assert (exercises.HERE / shlex.split(command)[1]).read_text().count(change[0]) == 1


# What checks/authors has recorded, and README and results/authors.md beside it. The scripts run by
# hand, beside the authors' programs, but for the one that compares with PyTorch.

AUTHORS = json.loads((HERE / "results" / "authors.json").read_text())


def test_every_difference_of_the_record_is_rounding_or_has_its_choice():
    lines = [line for part in AUTHORS["scripts"].values() for line in part["lines"]]
    assert lines and all(map(check.sound, lines))
    for line in lines:
        if line["because"]:
            name, *choices = line["because"].replace(",", "").split()
            page, own = (name, "") if (HERE / f"{name}.py").exists() else ("baselines", f"{name} ")
            text = (HERE / "docs" / f"{page}.md").read_text()
            assert choices and all(re.search(rf"^### {own}.*\b{choice}\b", text, re.M)
                                   for choice in choices), line["because"]


def test_the_readme_quotes_the_record():
    text = " ".join((HERE / "README.md").read_text().split())
    for name, title in (("superfed", "SuPerFed"), ("fedslr", "FedSLR"), ("pfedme", "pFedMe")):
        lines = AUTHORS["scripts"][name]["lines"]
        largest = max(line["difference"] for line in lines if not line["because"])
        assert f"{largest:.0e} for {title}" in text


def test_the_page_is_made_from_the_record():
    assert (HERE / "results" / "authors.md").read_text() == everything.page(AUTHORS)


def test_every_script_is_in_the_record():
    for name in check.SCRIPTS:
        script, part = check.script(name), AUTHORS["scripts"][name]
        assert [script.REPOSITORY, list(script.COMMITS)] == [part["repository"], part["commits"]]
    assert set(check.SCRIPTS) == set(AUTHORS["scripts"])


def test_the_script_that_needs_no_clone_finds_what_is_recorded():
    lines, recorded = (check.compared(check.script("torch_sgd"), None),
                       AUTHORS["scripts"]["torch_sgd"]["lines"])
    assert [line["what"] for line in lines] == [line["what"] for line in recorded]
    assert all(map(check.sound, lines))
