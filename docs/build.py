"""Writes the pages docs/*.html: the papers' pseudocode beside the code that carries it out. `make
docs` calls it.

Pseudocode and choices are from the docstrings, code from the files, the text below from
docs/NAME.md, the tables from results/NAME.md. All pages share docs/page.css and docs/page.js.
tests/test_docs.py checks what this script makes.
"""

import ast
import functools
import html
import itertools
import json
import pathlib
import re
import textwrap

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

HERE = pathlib.Path(__file__).resolve().parent.parent
PAPERS = {"fedavg": "FedAvg", "fedavgm": "FedAvgM", "superfed": "SuPerFed", "psinet": "Psi-Net",
          "fedslr": "FedSLR", "persfl": "PersFL", "baselines": "Baselines"}
# pages without code beside them
TEXTS = {"claims": "Claims", "compare": "Compare", "benchmark": "Benchmark", "extend": "Your own",
         "run": "Runs"}
MORE = ("authors", "speed", "shapes")  # and such as are not in the bar
IDEA = "The problem", "The idea", "The network", "Terms", "One step by hand"  # begin a paper's page
SLIDER = "results/superfed-1/superfed-cifar10-mix-model/0.json"
TABLES = "python -m papers --tables"  # draws the figures of the papers' tables from the records
RANKS = "python -m papers.fedslr_ranks results/fedslr/{}-cnn"
# a page: (the picture in results/, what it shows, the command that draws it), beside those of
# results/NAME.md
FIGURES = {
    "fedavg": [("fedavg-figure-1", "Figure 1: the average of two networks",
                "python -m papers.fedavg_figure_1"),
               ("fedavg-how-often", "How often one measures: each round, or every 20th",
                "python -m papers.fedavg_how_often")],
    "fedslr": [("fedslr-curves", "FedSLR beside other methods", "python -m papers.fedslr_curves"),
               *((f"fedslr/{data}-cnn/ranks", f"Accuracy, ranks and bytes over the rounds, {name}",
                  RANKS.format(data))
                 for data, name in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")))],
    "baselines": [(f"compare/{name}", "All methods on one split of the bundled images",
                   "make compare") for name in ("curves", "clients")],
}

# --------------------------------------------------------------------------------------------------
# What a file says of itself


def read(*path):
    return HERE.joinpath(*path).read_text(encoding="utf-8")


def pseudocode(doc):
    """[(number, column, text)] of a docstring's numbered lines. None: a title between them. "": the
    line above goes on."""
    rows, inside = [], False
    for line in doc.splitlines():
        match = re.match(r"( {4,6})(C?[1-9]\d?[a-z]?)(  +)([^\s.\d].*)", line)
        inside = bool(line.strip()) and (
            inside or bool(match) or line in ("    Server", "    Structure"))
        if match:
            rows.append((match[2], match.start(4), match[4]))
        elif inside:
            column = len(line) - len(line.lstrip())
            rows.append((None if column == 4 else "", column, line.strip()))
    return rows


def choices(doc):
    """{D1: its one line, ...}"""
    return {D: " ".join(text.split())
            for D, text in re.findall(r"^    (D\d+)  (.*(?:\n {8}\S.*)*)", doc, re.M)}


def tags(text):
    """The lines of the pseudocode that comments cite: l.7, l.7a, l.3-5."""
    cited = set()
    for comment in re.findall(r"#(.*)", text):
        for first, last in re.findall(r"l\.(C?\d+[a-z]?)(?:-(C?\d+))?", comment):
            part, first_number = re.match(r"(C?)(.*)", first).groups()
            cited |= ({f"{part}{n}" for n in range(int(first_number), int(last.strip("C")) + 1)}
                      if last else {first})
    return cited


def statements(tree):
    """{line: the lines of its statement}, for statements without others inside."""
    simple = [node for node in ast.walk(tree)
              if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    return {n: range(node.lineno, node.end_lineno + 1)
            for node in simple for n in range(node.lineno, node.end_lineno + 1)}


def sections(text, level):
    """[(title, text)] of the headings of a level of a Markdown text; what is before the first has
    the title ""."""
    first, *parts = re.split(rf"^{'#' * level} (.*)\n", text, flags=re.M)
    return [("", first), *zip(parts[::2], parts[1::2])]


# --------------------------------------------------------------------------------------------------
# Mathematics: w^f_{t+1}, lambda, ||w||^2, sum over k in S_t of ... as HTML

GREEK = dict(zip(["alpha", "beta", "gamma", "delta", "eta", "theta", "lambda", "mu", "nu", "pi",
                  "tau", "omega", "Omega", "infinity"], "αβγδηθλμνπτωΩ∞"))
GREEK["dw"] = "Δw"
SYMBOL = re.compile(rf"(?<![\w.'])(?<![A-Za-z]-)({'|'.join(GREEK)}|cos|[A-Za-z])('{{0,2}})"
                    r"((?:[_^](?:{[^{}]*}|[*+]|[A-Za-z0-9]+'?))*)(?!\w|-[a-z]{2}|/[a-z]{3}|\.\w)")
SCRIPT = re.compile(r"([_^])(?:{([^{}]*)}|([*+]|[A-Za-z0-9]+'?))")
SIGNS = [
    (r"&lt;([^&]+?), ([^&]+?)&gt;", r"⟨\1, \2⟩"),
    ("&gt;=", "≥"),
    ("&lt;=", "≤"),
    (" -&gt; ", " → "),
    (r"\.\.\.", "…"),
    (r"\|\|", "‖"),
    (r"(?!^\*$)(?<!\()(?<!; )\*", "·"),  # a product, and no footnote
    (r"[+-]\d?\.\d+ \[[^\]]+\]", r'<span class="word">\g<0></span>'),  # an interval
    (r"\b(?:DS-\d|(?:superfed|fedavg|fedprox)-[a-z]{2})\b", r'<span class="word">\g<0></span>'),
    (" - ", " − "),
    (r"(?<=\d)-(?=<i>)|(?<=</i>)-(?=\d)", "−"),
    (" ~ ", " ∼ "),
    (r"(?<=\d) x (?=\d)", " × "),
    (r"(<i>[a-z]</i>) in (?=<i>[A-Z])", r"\1 ∈ "),
    (r" \+- ", " ± "),
]


def scripts(text):
    """_k and ^f as sub- and superscript, one above the other where there are both."""
    tag = {"^": "sup", "_": "sub"}
    whole = "".join(f"<{tag[kind]}>{symbols(a or b).replace('*', '∗')}</{tag[kind]}>"
                    for kind, a, b in sorted(SCRIPT.findall(text)))
    return f'<span class="ss">{whole}</span>' if "^" in text and "_" in text else whole


def symbol(match):
    name, primes, after = match.groups()
    unit = name in "sx" and re.search(r"\d $", match.string[: match.start()])  # 62.6 s, 32 x 32
    unit = unit or name == "s" and match.string.startswith(" per round", match.end())
    if not primes and not after and (unit or name in ("a", "A", "I")):
        return match[0]
    base = name if name == "cos" else f"<i>{GREEK.get(name, name)}</i>"
    whole = base + "′" * len(primes) + scripts(after)
    # two scripts, one above the other, stay with their symbol at a line's end
    return f'<span class="word">{whole}</span>' if 'class="ss"' in whole else whole


def symbols(text):
    text = SYMBOL.sub(symbol, text)
    text = re.sub(r"\^(\([^()]*\)|<i>\w</i>)", r"<sup>\1</sup>", text)  # .995^(t+1), .998^t
    text = re.sub(r"(?<=[|)}])((?:[_^](?:{[^{}]*}|[A-Za-z0-9*]+))+)", lambda m: scripts(m[1]), text)
    for sign, replacement in SIGNS:
        text = re.sub(sign, replacement, text)
    return text


def inline_code(text):
    """A flag or a short name with hyphens stays on one line."""
    words = re.sub(r"(?<!\S)(?=\S*-)\S{,30}(?!\S)", r'<span class="word">\g<0></span>',
                   html.escape(text))
    return f"<code>{words}</code>"


def mathematics(text):
    """Plain text as HTML. `code` and --flags stay as they are."""
    def plain(text):
        text = re.sub(r"(?:the )?sum over ([^,;:.]{1,30}?) of ", "∑\0\\1\0 ",
                      html.escape(text, quote=False))
        text = re.sub(r"argmin over (\w) of", "argmin\0\\1\0", text)
        return "".join(f"<sub>{symbols(part)}</sub>" if i % 2 else symbols(part)
                       for i, part in enumerate(text.split("\0")))

    parts = re.split(r"(`[^`]+`|--[a-z][\w-]*(?: (?:N|\.?\d)\w*(?:\.\w+)*)?)", text)
    return "".join(inline_code(part.strip("`")) if i % 2 else plain(part)
                   for i, part in enumerate(parts))


# --------------------------------------------------------------------------------------------------
# Markdown


def slug(title):
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def address(link):
    """Markdown pages that are HTML pages, too, are linked as these; a heading D6 has the name
    D6."""
    link = re.sub(r"#(d\d+)-.*", lambda m: f"#{m[1].upper()}", link)
    link = link.replace("first-hour.md", "index.html")  # which shows it
    link = link.replace("../results/authors.md", "authors.md")
    return re.sub(r"^(\w+)\.md(?=#|$)",
                  lambda m: f"{m[1]}.html" if m[1] in (*PAPERS, *TEXTS, *MORE) else m[0], link)


@functools.cache
def parser():
    md = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table")
    md.add_render_rule("text", lambda _, tokens, i, *__: mathematics(tokens[i].content))
    md.add_render_rule("code_inline", lambda _, tokens, i, *__: inline_code(tokens[i].content))
    md.add_render_rule("table_open", lambda *_: '<div class="wide"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    return md


def markdown(text):
    def product(match):  # C*K is no emphasis
        return r"\*" if match[0] == "*" else match[0]

    text = re.sub(r"^(?!    ).*",
                  lambda m: re.sub(r"`[^`]*`|(?<=[\w)])\*(?=[\w(])", product, m[0]),
                  text, flags=re.M)
    tokens = parser().parse(text)
    for token, inline in zip(tokens, tokens[1:]):
        if token.type == "heading_open":
            token.attrSet("id", slug(inline.content))
        for child in inline.children or ():
            if child.type == "link_open":
                child.attrSet("href", address(child.attrs["href"]))
    return parser().renderer.render(tokens, parser().options, {})


def paragraph(text):
    return f"<p>{mathematics(' '.join(text.split()))}</p>"


def as_it_stands(block):
    """A docstring's block: sentences, and lines that are indented."""
    out = ""
    for indented, lines in itertools.groupby(
            block.splitlines(), lambda line: line.startswith("    ")):
        text = "\n".join(lines)
        out += f"<pre>{html.escape(textwrap.dedent(text))}</pre>" if indented else paragraph(text)
    return out


def fold(title, body, opened=False):
    return (f'<details class="fold" id="{slug(title)}"{" open" * opened}>'
            f"<summary>{mathematics(title)}</summary>\n{body}\n</details>")


# --------------------------------------------------------------------------------------------------
# The two columns, and the choices below them


def paper_side(doc, key):
    rows, lines_of, out = pseudocode(doc), {}, []
    first, label = min(column for number, column, _ in rows if number), None
    for D, line in choices(doc).items():  # which lines it says it is of: Lines 9 to 22: line 9
        spans = re.match(r"Lines? ((?:C?\d+[a-z]?(?: to C?\d+[a-z]?)?(?:, | and )?)+)", line)
        for number in re.findall(r"(?<!to )\bC?\d+[a-z]?", spans[1]) if spans else ():
            lines_of.setdefault(number, []).append(D)
    for number, column, text in rows:
        text, _, note = re.sub(r" {6,}", "\0", text, count=1).partition("\0")
        words = re.sub(r" {2,}", "&emsp;", mathematics(text))
        words += f' <span class="eq">{mathematics(note)}</span>' if note else ""
        if number is None:
            out.append(f'<div class="part">{words}</div>')
            continue
        label = number or label
        link = (f'<a class="n" href="#{key}c{label}" title="to its code">{label}</a>' if number
                else "<span></span>")
        words += "".join(f' <a class="d" href="#{key}{D}">{D}</a>'
                         for D in lines_of.get(number, ()))
        name, depth = f' id="{key}l{label}"' if number else "", max(column - first, 0) / 4
        out.append(f'<div class="row" data-l="{label}"{name}>{link}'
                   f'<div class="t" style="--in:{depth:g}">{words}</div></div>')
    return "\n".join(out)


@functools.cache
def coloured(text):
    return highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")


def code_side(file, lines, key):
    """The lines (numbers from 1) of a file, each with the lines of the pseudocode that it carries
    out."""
    text = read(file)
    source, together, seen, out = text.splitlines(), statements(ast.parse(text)), set(), []

    def to_pseudocode(match):
        new = sorted(tags("#" + match[0]) - seen,
                     key=lambda number: (int(re.search(r"\d+", number)[0]), number))
        seen.update(new)
        anchors = "".join(f'<a id="{key}c{number}"></a>' for number in new)
        return f'{anchors}<a class="l" href="#{key}l{match[1]}">{match[0]}</a>'

    def comment(match):
        words = re.sub(r"l\.(C?\d+[a-z]?)(?:-C?\d+)?", to_pseudocode, match[0])
        return re.sub(r"\bD\d+\b", lambda m: f'<a class="d" href="#{key}{m[0]}">{m[0]}</a>', words)

    for before, n in zip([None, *lines], lines):
        if not source[n - 1].strip() and before and not source[before - 1].strip():
            continue  # of several empty lines one
        own = tags(source[n - 1]) or set().union(
            *(tags(source[i - 1]) for i in together.get(n, ())))
        body = re.sub(r'^(?: |<span class="w"> *</span>)+', "", coloured(text)[n - 1])
        body = re.sub(r'<span class="(?:c1|sd)">.*?</span>', comment, body)
        body = re.sub(r'  (<span class="c1">.*)', r' <span class="tail"> \1</span>', body)
        labels = f' data-l="{" ".join(sorted(own))}"' if own else "" if body else " data-empty"
        indent = len(source[n - 1]) - len(source[n - 1].lstrip())
        table = " table" * bool(re.match(r"# .*\S {4,}\S", source[n - 1]))  # in a comment
        out.append(f'<div class="row{table}"{labels}><span class="n">{n}</span>'
                   f'<code style="--in:{indent}">{body}</code></div>')
    return (f'<div class="code"><h3><a href="../{file}">{file}</a></h3>\n'
            + "\n".join(out) + "</div>")


def in_order(D):
    return int(D[1:])


def listing(file, doc, lines, key="", about=""):
    """The two columns."""
    return (f'<div class="sides"><div class="paper"><h3>Pseudocode</h3>{about}\n'
            f'<div class="pseudo">\n{paper_side(doc, key)}\n</div></div>\n'
            f"{code_side(file, lines, key)}</div>\n")


def choice_list(doc, told, titles=(), key=""):
    """The choices, whose text told[D] is from the page in Markdown. titles[D]: that of a choice
    which has no line of the pseudocode, and so is on the page alone."""
    lines_of = choices(doc)
    of = {D: lines_of.get(D) or titles[D] for D in sorted({*lines_of, *titles}, key=in_order)}
    full = "\n".join(
        f'<details class="choice" id="{key}{D}"><summary><b>{D}</b> {mathematics(line)}</summary>'
        f"{markdown(told[D])}</details>" for D, line in of.items())
    return f'<div class="choices"><h3>Choices that change a number</h3>\n{full}\n</div>'


# --------------------------------------------------------------------------------------------------
# Pages

HINT = ('<p class="hint">Point at a line: what carries it out is marked on the other side. A '
        "click keeps the marks. <b>D1</b>, <b>D2</b>, … open a choice in place. Keys: Tab, ↑ ↓, "
        "Enter, Esc.</p>")


def page(name, title, body):
    # a flag that begins or ends a printed line stays whole
    body = re.sub(r"<pre.*?</pre>", lambda pre: re.sub(
        r"(?<=\s)--[a-z][a-z-]+", r'<span class="word">\g<0></span>', pre[0]), body, flags=re.S)
    links = "".join(f'<a href="{key}.html"{" aria-current=page" * (key == name)}>{text}</a>'
                    for key, text in {"index": "Start", **PAPERS, **TEXTS}.items())
    return ('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<!-- made by docs/build.py; don't edit -->\n"
            '<link rel="stylesheet" href="page.css">\n'
            f"<nav>{links}</nav>\n<main>\n{body}\n</main>\n"
            '<script src="page.js"></script>\n</html>\n')


def figures(name):
    tables, out = HERE / "results" / f"{name}.md", []
    drawn = (re.findall(r"^!\[(.*)\]\((.*)\.svg\)", tables.read_text(encoding="utf-8"), re.M)
             if tables.exists() else ())
    for picture, words, command in [*((picture, words, TABLES) for words, picture in drawn),
                                    *FIGURES.get(name, ())]:
        drawn_above = f"(../results/{picture}.svg)" in read("docs", f"{name}.md")
        if (HERE / "results" / f"{picture}.svg").exists() and not drawn_above:
            out.append(f'<figure><img src="../results/{picture}.svg" alt="{words}">'
                       f"<figcaption>{mathematics(words)}. "
                       f"<code>{html.escape(command)}</code></figcaption></figure>")
    return fold("Figures", "\n".join(out), True) if out else ""


def ours_beside(name):
    """The papers' tables beside ours, if there are any."""
    tables = HERE / "results" / f"{name}.md"
    if not tables.exists():
        return ""
    text = re.sub(r"^!\[.*\n", "", tables.read_text(encoding="utf-8"), flags=re.M)
    text = re.sub(r"\]\((?!\w+:|\.\./)", "](../results/", text)
    (_, about), *rest = sections(text.replace("](../docs/", "]("), 2)
    rest = "\n".join(fold(title, markdown(body)) for title, body in rest)
    return fold("Ours beside the paper's: all tables", markdown(about.split("\n", 1)[1]) + rest)


def section(title, text):
    return f'<section id="{slug(title)}"><h2>{mathematics(title)}</h2>\n{markdown(text)}</section>'


def slider():
    """SuPerFed's mixture, and the recorded accuracy of it, for a lambda that the reader moves."""
    lambdas = json.loads(read(SLIDER))["final"]["lambdas"]
    curve = json.dumps([round(row["mean"], 3) for row in lambdas])
    text = read("docs", "superfed-slider.html")
    return text.replace("[curve]", curve).replace("[record]", SLIDER)


def paper_page(name):
    """In this order: the idea; how to run it; pseudocode beside code; evidence; exercises; choices;
    the paper's tables."""
    text, page_text = read(f"{name}.py"), read("docs", f"{name}.md")
    tree, doc = ast.parse(text), text.split('"""', 2)[1]
    imports = max(node.end_lineno for node in tree.body
                  if isinstance(node, (ast.Import, ast.ImportFrom)))
    rule = text[: text.index("\n# -----")].rstrip().count("\n") + 1
    start = next(n for n in range(imports, rule) if text.splitlines()[n].strip()) + 1
    told, titles, parts = {}, {}, {}  # told, titles: of a choice
    for title, part in sections(page_text, 2)[1:]:
        parts[title] = ""
        for heading, body in sections(part, 3):
            if match := re.match(r"(D\d+): (.*)", heading):
                told[match[1]], titles[match[1]] = body, match[2] + "."
            else:
                parts[title] += (f"### {heading}\n" if heading else "") + body
    about, exercises = parts.pop("The choices"), parts.pop("Exercises")
    idea = [section(title, parts.pop(title)) for title in IDEA if title in parts]
    if name == "superfed":
        idea.insert(2, slider())  # below the idea
    cite, *before = doc.split("\n\n")
    before = before[: next(i for i, block in enumerate(before) if pseudocode(block))]
    before = [block for block in before if not choices(block)]
    # the sentence that leads to this page
    before[-2] = re.sub(r"\s*docs/\w+\.md (?:explains|has) our choices[^:]*:", "", before[-2])
    run = "".join(map(as_it_stands, before[:-1]))
    evidence = [fold(title, markdown(part), title.startswith("What"))
                for title, part in parts.items()]
    links = " ".join(f'<a href="#{slug(title)}">{title}</a>' for title in (
        *(title for title in IDEA if f"## {title}\n" in page_text), "Pseudocode and code",
        *parts, "Exercises", "The choices"))
    body = [f'<header><h1>{PAPERS[name]}</h1><p class="cite">{html.escape(" ".join(cite.split()))}'
            f'</p><p class="toc">{links}</p></header>', *idea,
            f'<section id="{slug("Pseudocode and code")}"><h2>Pseudocode and code</h2>{HINT}'
            f'{listing(f"{name}.py", doc, range(start, rule + 1), about=paragraph(before[-1]))}'
            "</section>",
            fold("Run it, and what to expect", run, True), *evidence, figures(name),
            fold("Exercises", markdown(exercises), True),
            section("The choices", about) + choice_list(doc, told, titles), ours_beside(name)]
    return page(name, f"{PAPERS[name]}: pseudocode beside code", "\n".join(body))


def baselines_page():
    text = read("baselines.py")
    tree, doc = ast.parse(text), text.split('"""', 2)[1]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    table = next(node.value for node in tree.body
                 if isinstance(node, ast.Assign) and node.targets[0].id == "METHODS")
    methods, told, about, rest, out = {}, {}, {}, [], []
    for flag, function in zip(table.keys, table.values):
        methods.setdefault(function.id, []).append(flag.value)
    for title, part in sections(read("docs", "baselines.md"), 2)[1:]:
        flags = re.findall(r"`([\w-]+)`", title)
        told |= {tuple(heading.split(":")[0].split()): body for heading, body in sections(part, 3)}
        about |= dict.fromkeys(flags, sections(part, 3)[0][1])
        rest += [] if flags else [(title, part)]
    for name, flags in methods.items():
        own, first = ast.get_docstring(functions[name], clean=False), functions[name].body[0]
        lines = [*range(functions[name].lineno, first.lineno),
                 *range(first.end_lineno + 1, functions[name].end_lineno + 1)]
        cite, *blocks = own.split("\n\n")
        remarks = [re.sub(r"^    D1  .*", "", block, flags=re.M | re.S)
                   for block in blocks if not pseudocode(block)]
        texts = {D: told[next((flag, D) for flag in flags if (flag, D) in told)]
                 for D in choices(own)}
        cite = html.escape(" ".join(cite.split()))
        out.append(
            f'<section id="{flags[0]}"><h2>{", ".join(flags)}</h2><p class="cite">{cite}</p>\n'
            + markdown(about[flags[0]])
            + listing("baselines.py", own, lines, key=f"{flags[0]}-",
                      about="".join(map(paragraph, filter(str.strip, remarks))))
            + choice_list(own, texts, key=f"{flags[0]}-") + "</section>")
    others = [n for name, node in functions.items() if name not in (*methods, "arguments", "main")
              for n in range(node.lineno, node.end_lineno + 2)]
    links = " ".join(f'<a href="#{flags[0]}">{", ".join(flags)}</a>' for flags in methods.values())
    words = [block for block in doc.split("\n\n")
             if block.startswith(("Symbols", "Models", "Local SGD"))]
    rest = [fold(title, markdown(part), title.startswith("What")) for title, part in rest]
    body = ('<header><h1>Baselines</h1><p class="cite">The methods that the papers compare with.'
            f'</p>{HINT}<p class="toc">{links}</p></header>\n'
            + rest.pop(0) + fold("Symbols and models", "".join(map(paragraph, words))) + "\n"
            + fold("Functions that the methods call", code_side("baselines.py", others, "other-"))
            + "\n".join(out) + "\n".join(rest) + figures("baselines"))
    return page("baselines", "Baselines: pseudocode beside code", body)


def index_page():
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \| (.*?) \| (.*?) \|", read("README.md"), re.M)
    # a card is a link already
    rows = {name: [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell) for cell in cells]
            for name, *cells in rows}
    cards = "".join(f'<a class="card" href="{name}.html"><b>{title}</b> {html.escape(paper)}<br>'
                    f"{html.escape(idea)}</a>"
                    for name, title in PAPERS.items() for paper, idea in [rows[name]])
    links = "".join(f'<li><a href="{name}.html">{html.escape(heading(name))}</a></li>'
                    for name in (*TEXTS, *MORE))
    title, text = read("docs", "first-hour.md").split("\n", 1)
    body = ("<header><h1>Federated learning, one file per paper</h1>"
            "<p>Many clients (phones, hospitals) hold images that must not leave them. Federated "
            "learning trains one model from all these images. Each page shows a paper's pseudocode "
            "beside its code, the choices that change a number, what was measured, and exercises."
            f'</p></header>\n<div class="cards">{cards}</div>\n<ul>{links}</ul>\n'
            f"<section><h2>{title.strip('# ')}</h2>\n{markdown(text)}</section>")
    return page("index", "Federated learning, one file per paper", body)


def text_of(name):
    return read("results" if name == "authors" else "docs", f"{name}.md")


def heading(name):
    return text_of(name).split("\n", 1)[0].strip("# ")


def text_page(name):
    return page(name, heading(name), markdown(text_of(name)))


def pages():
    """{file name: text} of all pages."""
    made = {name: paper_page(name) for name in PAPERS if name != "baselines"}
    made |= {"baselines": baselines_page(), "index": index_page()}
    made |= {name: text_page(name) for name in (*TEXTS, *MORE)}
    return {f"{name}.html": text for name, text in made.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / "docs" / name).write_text(text, encoding="utf-8")
        print(f"page    docs/{name}")
