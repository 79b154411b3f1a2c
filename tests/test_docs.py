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
from papers import figures

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


@pytest.mark.parametrize("text, wanted", [
    ("w^f_0", '<span class="word"><i>w</i><span class="ss"><sup><i>f</i></sup>'
              "<sub>0</sub></span></span>"),
    ("G_{E_G+1}", "<i>G</i><sub><i>E</i><sub><i>G</i></sub>+1</sub>"),
    ("lambda * eta_g", "<i>λ</i> · <i>η</i><sub><i>g</i></sub>"),
    ("a client's I", "a client's I"),
    ("the sum over k in S_t of n_k",
     "∑<sub><i>k</i> ∈ <i>S</i><sub><i>t</i></sub></sub> <i>n</i><sub><i>k</i></sub>"),
    ("||.||_*", "‖.‖<sub>∗</sub>"),
    ("l'_k < D''", "<i>l</i>′<sub><i>k</i></sub> &lt; <i>D</i>′′"),
    ("Phase I, CIFAR-10, non-IID, D12", "Phase I, CIFAR-10, non-IID, D12"),
    ("--unseen N, `w_k`",
     '<code><span class="word">--unseen</span> N</code>, <code>w_k</code>'),
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


def test_names_in_figures_are_in_print():
    assert figures.words("LM mu=0.01, nu=2") == r"Layer Mixing $\mu$ = 0.01, $\nu$ = 2"


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
