"""docs/*.html are the pages that docs/build.py makes from today's files; their links lead
somewhere; figures have one style."""

import ast
import html.parser
import pathlib
import re

import pytest
from PIL import Image

import common
import fl.plots
from docs import build

pytestmark = pytest.mark.pages
HERE = pathlib.Path(build.HERE)
PAGES = build.pages()


class Page(html.parser.HTMLParser):
    """What a page links to and what can be linked to; that every tag which is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.pictures = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        self.pictures += [attrs["src"]] if tag == "img" else []
        if tag not in ("meta", "link", "img", "br", "hr", "p", "li"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("p", "li"):
            assert self.open.pop() == tag, (tag, self.getpos())


READ = {name: Page(text) for name, text in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = READ[name]
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    for link in page.links:
        file, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        assert not file or (HERE / "docs" / file).exists() or file in PAGES, link
        if anchor and (not file or file in READ):
            assert anchor in READ[file or name].ids, link
    assert all((HERE / "docs" / picture).exists() for picture in page.pictures)
    # a link that was left as Markdown
    assert "](" not in re.sub(r"<code.*?</code>", "", PAGES[name], flags=re.S)
    # a row that stands outside of its table
    assert not re.search(r"^(?:<p>)?\| ", PAGES[name], re.M)


@pytest.mark.parametrize("name", PAGES)
def test_pages_need_no_network(name):
    shared = re.findall(r'<(?:link|script)[^>]* (?:href|src)="([^"]*)"', PAGES[name])
    assert shared == ["page.css", "page.js"]
    for text in (PAGES[name], *((HERE / "docs" / file).read_text() for file in shared)):
        assert not re.search(r"(?:src=|@import|url\()[\"']?https?:|fetch\(", text)


def test_a_statement_of_several_lines_is_marked_as_one(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(
        "x = f(1,\n      2)  # l.4 (D2)\ny = {  # l.5\n    1: 2}\nif x:\n    z = 3\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    side = build.code_side("some.py", range(1, 7), "k-")
    assert re.findall(r'class="row"(?: data-l="([^"]*)"|)>', side) == ["4", "4", "5", "5", "", ""]
    assert ('<a id="k-c4"></a><a class="l" href="#k-l4">l.4</a>' in side
            and '<a class="d" href="#k-D2">D2</a>' in side)


def test_pseudocode_and_choices():
    doc = """Title. 2020.

    rounds   last
    40       .31

    Server
     1  choose w
     2  for each k:
     3      w = f(k)      (3)
            with f
    Client
    11  stop

    D1  Line 3: one
        choice.
    D2  another
"""
    assert build.pseudocode(doc) == [
        (None, 4, "Server"), ("1", 8, "choose w"), ("2", 8, "for each k:"),
        ("3", 12, "w = f(k)      (3)"), ("", 12, "with f"),
        (None, 4, "Client"), ("11", 8, "stop")]
    assert build.choices(doc) == {"D1": "Line 3: one choice.", "D2": "another"}
    assert build.tags("x  # l.2-4, l.7a (D1)\nl.9\n") == {"2", "3", "4", "7a"}
    side = build.paper_side(doc, "")
    assert (side.count('href="#D1"') == 1 and re.search(r'id="l3".*href="#D1"', side)
            and "#D2" not in side)


@pytest.mark.parametrize("text, wanted", [
    ("w_k", "<i>w</i><sub><i>k</i></sub>"),
    ("w^f_0", '<span class="word"><i>w</i><span class="ss"><sup><i>f</i></sup>'
              "<sub>0</sub></span></span>"),
    ("w^{t+1}", "<i>w</i><sup><i>t</i>+1</sup>"),
    ("G_{E_G+1}", "<i>G</i><sub><i>E</i><sub><i>G</i></sub>+1</sub>"),
    ("lambda * eta_g", "<i>λ</i> · <i>η</i><sub><i>g</i></sub>"),
    ("a client's I", "a client's I"),
    ("t >= L*R", "<i>t</i> ≥ <i>L</i>·<i>R</i>"),
    ("cos^2(x)", "cos<sup>2</sup>(<i>x</i>)"),
    ("the sum over k in S_t of n_k",
     "∑<sub><i>k</i> ∈ <i>S</i><sub><i>t</i></sub></sub> <i>n</i><sub><i>k</i></sub>"),
    ("||w||^2", "‖<i>w</i>‖<sup>2</sup>"),
    ("||.||_*", "‖.‖<sub>∗</sub>"),
    ("<u, v>", "⟨<i>u</i>, <i>v</i>⟩"),
    ("1-lambda", "1−<i>λ</i>"),
    ("l'_k < D''", "<i>l</i>′<sub><i>k</i></sub> &lt; <i>D</i>′′"),
    ("62.6 s, 32 x 32", "62.6 s, 32 × 32"),
    ("Phase I, CIFAR-10, non-IID, D12", "Phase I, CIFAR-10, non-IID, D12"),
    (".995^(t+1)", ".995<sup>(<i>t</i>+1)</sup>"),
    ("--unseen N, `w_k`",
     '<code><span class="word">--unseen</span> N</code>, <code>w_k</code>'),
    ("Omega_shared", "<i>Ω</i><sub>shared</sub>"),
])
def test_mathematics(text, wanted):
    assert build.mathematics(text) == wanted


def test_figures_are_sharp_and_equal_and_their_legend_covers_nothing(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn, close = [], pyplot.close
    monkeypatch.setitem(fl.plots.STYLE, "savefig.dpi", 300)
    monkeypatch.setattr(pyplot, "close", lambda figure: (drawn.append(figure), close(figure)))
    for name in ("a.png", "b.png"):
        with common.drawing(tmp_path / name, 1, 2, (5, 2.5), "one, two") as axes:
            for axis in axes:
                axis.plot([1, 2, 3], [0.1, 0.2, 0.15], label="accuracy")
                axis.plot([1, 2, 3], [0.3, 0.1, 0.2], label="another of a longer name")
                axis.set_xlabel("round")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    picture = Image.open(tmp_path / "a.png")
    assert picture.size == (1500, 750) and [round(dpi) for dpi in picture.info["dpi"]] == [300, 300]
    (legend,), axes = drawn[0].legends, drawn[0].axes
    assert [text.get_text() for text in legend.get_texts()] == [
        "accuracy", "another of a longer name"]
    assert not any(legend.get_window_extent().overlaps(axis.get_tightbbox()) for axis in axes)
    assert all(tick == int(tick) for axis in axes for tick in axis.get_xticks())


ALGORITHMS = ["fedavg", "fedavgm", "superfed", "psinet", "fedslr", "persfl", "baselines"]
ROOMS = {  # what the modules of a room may import
    "fl": {"fl"}, "common": {"fl"}, **dict.fromkeys(ALGORITHMS, {"common"}),
    "comparing": {"comparing", "common", "fl", *ALGORITHMS},
    "papers": {"papers", "common", "fl", *ALGORITHMS},
    "compare": {"comparing", "common", "fl", *ALGORITHMS},
}


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_go_one_way(room):
    """And the top level has no module but these: one would hide a user's own of that name."""
    ours = {*ROOMS, "checks", "docs", "tests"}
    assert {path.stem for path in HERE.glob("*.py")} == {*ALGORITHMS, "common", "compare"}
    files = [*(HERE / room).rglob("*.py"), *HERE.glob(f"{room}.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            used = {name.split(".")[0] for name in names} & ours
            assert used <= ROOMS[room], f"{file}: {used - ROOMS[room]}"
