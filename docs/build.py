"""Writes the pages docs/*.html: the papers' pseudocode beside the code that carries it out. `make docs` calls it.

Pseudocode and choices come from the docstrings, code from the files, all text below from docs/NAME.md, the tables from
results/NAME.md. A page is one file: docs/page.css and docs/page.js are copied into it. tests/test_docs.py compares the committed
pages with what this script makes.
"""

import ast
import functools
import html
import pathlib
import re

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

HERE = pathlib.Path(__file__).resolve().parent.parent
PAPERS = {"fedavg": "FedAvg", "fedavgm": "FedAvgM", "superfed": "SuPerFed", "psinet": "Psi-Net", "fedslr": "FedSLR", "persfl": "PersFL",
          "baselines": "Baselines"}
TABLES = "python reproduce.py --tables"  # the command that draws the figures of the tables from the records
RANKS = "python fedslr.py --dataset {} --model cnn --rounds 60 --lambda 1e-3 --eval-every 10 --plot"
FIGURES = {  # the page: (the picture in results/, what it shows, the command that draws it)
    "fedavg": [("superfed-1", "The global models over the rounds; dashed: the paper's values", TABLES)],
    "fedavgm": [("fedavgm-figure-5", "Accuracy over the clients' likeness alpha", TABLES),
                ("fedavgm-figure-4", "Sensitivity to the rate eta", TABLES),
                ("fedavgm-figure-6", "Sensitivity to eta/(1-beta)", TABLES)],
    "superfed": [("superfed-figure-2", "The clients' accuracy over lambda", TABLES),
                 ("superfed-figure-3", "The global model over the rounds; vertical: Phase II begins", TABLES),
                 ("superfed-1", "The global models of SuPerFed and the methods it compares with", TABLES)],
    "psinet": [("psinet-norm", "The global models over the rounds", TABLES)],
    "fedslr": [("fedslr/cifar10-cnn/ranks", "CIFAR-10: accuracy, ranks and bytes over the rounds", RANKS.format("cifar10")),
               ("fedslr/cifar100-cnn/ranks", "CIFAR-100: accuracy, ranks and bytes over the rounds", RANKS.format("cifar100"))],
    "persfl": [("persfl-figure-2", "The round of each user's teacher", TABLES)],
    "baselines": [("compare", "All methods on one split of the embedded images", "make compare")],
}

# ---------------------------------------------------------------------------------------------------------------------
# What a file says of itself


def pseudocode(doc):
    """[(number, column, text)] of a docstring's numbered lines; number None: a title between them, "": the line before goes on."""
    rows, inside = [], False
    for line in doc.splitlines():
        match = re.match(r"( {4,5})([1-9]\d?[a-z]?)(  +)([^\s.\d].*)", line)
        inside = bool(line.strip()) and (inside or bool(match) or line in ("    Server", "    Structure"))
        if match:
            rows.append((match[2], match.start(4), match[4]))
        elif inside and not re.match(r"    D\d+  ", line):
            column = len(line) - len(line.lstrip())
            rows.append((None if column == 4 else "", column, line.strip()))
    return rows


def choices(doc):
    """{D1: its one line, ...}"""
    return {number: " ".join(text.split()) for number, text in re.findall(r"^    (D\d+)  (.*(?:\n {8}\S.*)*)", doc, re.M)}


def tags(text):
    """The lines of the pseudocode that comments cite: l.7, l.7a, l.3-5."""
    cited = set()
    for comment in re.findall(r"#(.*)", text):
        for first, last in re.findall(r"l\.(\d+[a-z]?)(?:-(\d+))?", comment):
            cited |= set(map(str, range(int(first), int(last) + 1))) if last else {first}
    return cited


def statements(tree):
    """{line: the lines of its statement} for statements of several lines without others inside."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not isinstance(getattr(node, "value", None), ast.Constant):
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), range(node.lineno, node.end_lineno + 1))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Mathematics in HTML: w^f_{t+1}, lambda, ||w||^2, sum over k in S_t of ...

GREEK = dict(zip("alpha beta gamma delta eta theta lambda mu nu pi tau omega Omega infinity".split(), "αβγδηθλμνπτωΩ∞"))
SYMBOL = re.compile(rf"(?<![\w.'])(?<![A-Za-z]-)({'|'.join(GREEK)}|cos|dw|[A-Za-z])('{{0,2}})((?:[_^](?:{{[^{{}}]*}}|\w|[*+])"
                    r"[A-Za-z0-9]*'?)*)(?!\w|-[a-z]{2}|\.\w)")
SCRIPT = re.compile(r"([_^])(?:{([^{}]*)}|([*+]|[A-Za-z0-9]+'?))")
SIGNS = [(r"&lt;([^&]+?), ([^&]+?)&gt;", r"⟨\1, \2⟩"), ("&gt;=", "≥"), ("&lt;=", "≤"), (" -&gt; ", " → "), (r"\.\.\.", "…"), (r"\|\|", "‖"),
         (r" \* ", " · "), (r"\*", "·"), (" - ", " − "), (r"(?<=\d)-(?=<i>)|(?<=</i>)-(?=\d)", "−"), (" ~ ", " ∼ "), (r"(?<=\d) x (?=\d)", " × "),
         (r"(<i>[a-z]</i>) in (?=<i>[A-Z])", r"\1 ∈ "), (r" \+- ", " ± ")]


def scripts(text):
    """_k and ^f as sub- and superscript; one above the other where there are both."""
    tag = {"^": "sup", "_": "sub"}
    parts = "".join(f"<{tag[kind]}>{symbols(a or b)}</{tag[kind]}>" for kind, a, b in sorted(SCRIPT.findall(text)))  # ^ before _
    return f'<span class="ss">{parts}</span>' if "<sub>" in parts and "<sup>" in parts else parts


def symbol(match):
    name, primes, after = match.groups()
    unit = re.search(r"\d $", match.string[: match.start()]) and name in "sx"  # 62.6 s, 32 x 32
    if not primes and not after and (name in ("a", "A", "I", "cos") or unit):
        return match[0]
    name = name if name == "cos" else f"<i>{GREEK.get(name, name.replace('dw', 'Δw'))}</i>"
    return name + "′" * len(primes) + scripts(after)


def symbols(text):
    text = SYMBOL.sub(symbol, text)
    text = re.sub(r"\^(\([^()]*\))", r"<sup>\1</sup>", text)
    text = re.sub(r"(?<=[|)}])((?:[_^](?:{[^{}]*}|[A-Za-z0-9*]+))+)", lambda m: scripts(m[1]), text)
    for sign, replacement in SIGNS:
        text = re.sub(sign, replacement, text)
    return text


def mathematics(text):
    """Plain text as HTML. `code` and --flags stay as they are."""
    def plain(text):
        text = html.escape(text, quote=False)
        text = re.sub(r"(?:the )?sum over ([^,;:.]{1,30}?) of ", r"∑_{\1} ", text)
        text = re.sub(r"argmin over (\w) of", r"argmin_{\1}", text)
        text = re.sub(r"(∑|argmin)_{((?:[^{}]|{[^{}]*})*)}", lambda m: f'<span class="big">{m[1]}</span><sub>{symbols(m[2])}</sub>', text)
        return "".join(part if part.startswith("<") else symbols(part) for part in re.split(r"(<[^>]*>)", text))

    parts = re.split(r"(`[^`]+`|--[a-z][\w-]*(?: [\dN][\w.]*)?)", text)
    return "".join(f"<code>{html.escape(part.strip('`'))}</code>" if i % 2 else plain(part) for i, part in enumerate(parts))


# ---------------------------------------------------------------------------------------------------------------------
# Markdown


def address(link):
    """Links to Markdown pages that are pages here, too, lead to these."""
    link = re.sub(r"^(\w+)\.md#(d\d+)-.*", lambda m: f"{m[1]}.md#{m[2].upper()}", link)
    return re.sub(r"^(\w+)\.md(?=#|$)", lambda m: f"{m[1]}.html" if m[1] in PAPERS else m[0], link)


def slug(title):
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@functools.cache
def parser():
    md = MarkdownIt("commonmark", {"html": True}).enable("table")
    md.add_render_rule("text", lambda _, tokens, i, *__: mathematics(tokens[i].content))
    md.add_render_rule("table_open", lambda *_: '<div class="wide"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    return md


def markdown(text):
    text = re.sub(r"^(?!    ).*", lambda line: re.sub(r"`[^`]*`|(?<=[\w)])\*(?=[\w(])", lambda m: m[0].replace("*", r"\*") if m[0] == "*" else m[0],
                                                      line[0]), text, flags=re.M)  # C*K is a product
    tokens = parser().parse(text)
    for token, inline in zip(tokens, tokens[1:]):
        if token.type == "heading_open":
            token.attrSet("id", slug(inline.content))
        for child in inline.children or ():
            if child.type == "link_open":
                child.attrSet("href", address(child.attrs["href"]))
    return parser().renderer.render(tokens, parser().options, {})


def sections(text, level):
    """[(title, text)] of the headings of a level; what is before the first has the title "". Deeper ones stay in the text."""
    first, *parts = re.split(rf"^{'#' * level} (.*)\n", text, flags=re.M)
    return [("", first), *zip(parts[::2], parts[1::2])]


# ---------------------------------------------------------------------------------------------------------------------
# One listing: pseudocode on the left, code on the right


def paper_side(rows, lines_of, told, key):
    first, out = min(column for number, column, _ in rows if number), []
    label = None
    for number, column, text in rows:
        text, _, note = re.sub(r" {6,}", "\0", text, count=1).partition("\0")
        words = re.sub(r" {2,}", "&emsp;", mathematics(text)) + (f' <span class="eq">{mathematics(note)}</span>' if note else "")
        if number is None:
            out.append(f'<div class="part">{words}</div>')
            continue
        label = number or label
        here = "".join(f' <a class="d" href="#{key}{D}">{D}</a>' for D in told if number and number in lines_of[D])
        anchor = f'<a class="n" href="#{key}c{label}" aria-label="line {label}, its code">{label}</a>' if number else '<span class="n"></span>'
        name = f' id="{key}l{label}"' if number else ""
        out.append(f'<div class="row" data-l="{label}"{name}>{anchor}<div class="t" style="--in:{max(column - first, 0) / 4:g}">{words}{here}</div></div>')
    return "\n".join(out)


def code_side(file, lines, key):
    """The lines (numbers from 1) of a file, each with the lines of the pseudocode that it carries out."""
    text = (HERE / file).read_text()
    source, coloured = text.splitlines(), highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    together, seen, out = statements(ast.parse(text)), set(), []

    def line_link(match):
        new = sorted(tags("#" + match[0]) - seen, key=lambda n: (int(re.match(r"\d+", n)[0]), n))
        seen.update(new)
        anchors = "".join(f'<a id="{key}c{number}"></a>' for number in new)
        return f'{anchors}<a class="l" href="#{key}l{match[1]}">{match[0]}</a>'

    def comment(match):
        words = re.sub(r"l\.(\d+[a-z]?)(?:-\d+)?", line_link, match[0])
        return re.sub(r"\bD\d+\b", lambda m: f'<a class="d" href="#{key}{m[0]}">{m[0]}</a>', words)

    for before, n in zip([None, *lines], lines):
        if not source[n - 1].strip() and before and not source[before - 1].strip():
            continue  # of several empty lines one
        own = tags(source[n - 1]) or set().union(*(tags(source[i - 1]) for i in together.get(n, [n])))
        indent = len(source[n - 1]) - len(source[n - 1].lstrip())
        body = re.sub(r'<span class="(?:c1|sd)">.*?</span>', comment, re.sub(r'^(?: |<span class="w"> *</span>)+', "", coloured[n - 1]))
        body = re.sub(r'  (<span class="c1">)', r' <span class="tail"> \1', body) + "</span>" * ("  <span class=\"c1\">" in body)
        labels = f' data-l="{" ".join(sorted(own))}"' if own else "" if body else " data-empty"
        out.append(f'<div class="row"{labels}><span class="n">{n}</span><code style="--in:{indent}">{body}</code></div>')
    return "\n".join(out)


def in_full(key, D, line, text):
    return f'<details class="choice" id="{key}{D}"><summary><b>{D}</b> {mathematics(line)}</summary>{markdown(text)}</details>'


def listing(file, doc, lines, told, key="", after=""):
    """The two columns, and below them the choices. told: {D: its text on the page}."""
    rows, one_line = pseudocode(doc), choices(doc)
    order, lines_of = [number for number, *_ in rows if number], {}
    for D, line in one_line.items():
        spans = re.match(r"Lines? ((?:\d+[a-z]?(?:, | and | to )?)+)", line)
        names = re.findall(r"(\d+[a-z]?)(?: to (\d+[a-z]?))?", spans[1]) if spans else ()
        lines_of[D] = {n for a, b in names if a in order for n in order[order.index(a): order.index(b or a) + 1]}
    symbols_used = doc[: doc.index("\n\n" + next(part for part in doc.split("\n\n") if pseudocode(part)))].split("\n\n")[-1]
    full = "\n".join(in_full(key, D, line, told[D]) for D, line in one_line.items())
    return (f'<div class="sides"><div class="paper"><h3>Pseudocode</h3><p>{mathematics(" ".join(symbols_used.split()))}</p>\n'
            f'<div class="pseudo">\n{paper_side(rows, lines_of, one_line, key)}\n</div></div>\n'
            f'<div class="code"><h3><a href="../{file}">{file}</a></h3>\n{code_side(file, lines, key)}\n{after}</div></div>\n'
            f'<div class="choices"><h3>Choices that change a number</h3>\n{full}\n</div>')


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def page(name, title, body):
    css, js = ((HERE / "docs" / f"page.{kind}").read_text() for kind in ("css", "js"))
    links = "".join(f'<a href="{key}.html"{" aria-current=page" * (key == name)}>{text}</a>' for key, text in {"index": "Start", **PAPERS}.items())
    return ('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<!-- made by docs/build.py; don't edit -->\n<style>\n{css}</style>\n<nav>{links}</nav>\n<main>\n{body}\n</main>\n"
            f"<script>\n{js}</script>\n</html>\n")


def pictures(name):
    out = []
    for picture, words, command in FIGURES[name]:
        path = next((p for p in (f"{picture}.svg", f"{picture}.png") if (HERE / "results" / p).exists()), None)
        if path:
            out.append(f'<figure><img src="../results/{path}" alt="{words}" loading="lazy"><figcaption>{mathematics(words)}. '
                       f"<code>{html.escape(command)}</code></figcaption></figure>")
    return "\n".join(out)


def fold(title, body, opened=False):
    return f'<details class="fold" id="{slug(title)}"{" open" * opened}><summary>{mathematics(title)}</summary>\n{body}\n</details>'


def below(name, parts):
    """What follows the two columns: the sections of docs/NAME.md, the figures and the tables. parts: [(title, text)]."""
    out, figures = [], pictures(name)
    tables = HERE / "results" / f"{name}.md"
    for title, text in parts:
        if title != "Exercises":
            out.append(fold(title, markdown(text), title in ("What was measured", "What the committed records say")))
    if figures:
        out.append(fold("Figures", figures, True))
    if tables.exists():
        text = re.sub(r"^!\[.*\n", "", tables.read_text(), flags=re.M).replace("](../docs/", "](")
        text = re.sub(r"\]\((?!\w+:|\.\./|\w+\.md[)#])", "](../results/", text)
        rest = "\n".join(fold(title, markdown(body)) for title, body in sections(text, 2)[1:])
        out.append(fold("Ours beside the paper's: all tables", markdown(sections(text, 2)[0][1].split("\n", 1)[1]) + rest))
    out += [fold(title, markdown(text), True) for title, text in parts if title == "Exercises"]
    return "\n".join(out)


def intro(doc):
    """Title, citation and commands, from the first paragraphs of a docstring."""
    first, *rest = re.split(r"\n\n", doc)
    rest = rest[: next(i for i, part in enumerate(rest) if pseudocode(part)) - 1]
    out = [f'<p class="cite">{html.escape(" ".join(first.split()))}</p>']
    more = [f"<pre>{html.escape(re.sub('^    ', '', part, flags=re.M))}</pre>" if part.startswith("    ") else f"<p>{mathematics(' '.join(part.split()))}</p>"
            for part in rest]
    return "\n".join(out), "\n".join(more)


HINT = ('<p class="hint">Point at a line of the pseudocode: the code that carries it out is marked, and the other way round. A click keeps the marks. '
        "<b>D1</b>, <b>D2</b>, … open a choice in place. Keys: Tab, ↑ ↓, Enter, Esc.</p>")


def paper_page(name):
    _, doc, code = (HERE / f"{name}.py").read_text().split('"""', 2)
    text = (HERE / f"{name}.py").read_text()
    tree, rule = ast.parse(text), text[: text.index("\n# -----")].count("\n") + 1
    imports = max(node.end_lineno for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    lines = range(imports + 1, rule + 1)
    source = text.splitlines()
    lines = [n for n in lines if any(source[i - 1].strip() for i in lines if i <= n) and any(source[i - 1].strip() for i in lines if i >= n)]
    parts = sections((HERE / "docs" / f"{name}.md").read_text(), 2)
    told = {title.split(":")[0]: body for _, part in parts for title, body in sections(part, 3) if re.match(r"D\d+:", title)}
    shown = []  # without the choices, which stand below the columns
    for title, part in parts[1:]:
        if title == "The choices":
            title, part = "About the choices", "".join((f"### {t}\n" if t else "") + body for t, body in sections(part, 3) if not re.match(r"D\d+:", t))
        shown.append((title, part))
    cite, run = intro(doc)
    body = (f"<header><h1>{PAPERS[name]}</h1>{cite}{HINT}</header>\n{listing(f'{name}.py', doc, lines, told)}\n"
            + fold("Run it, and what to expect", run, True) + below(name, shown))
    return page(name, f"{PAPERS[name]}: pseudocode beside code", body)


def baselines_page():
    text = (HERE / "baselines.py").read_text()
    tree, doc = ast.parse(text), text.split('"""', 2)[1]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "METHODS")
    methods = {}
    for flag, function in zip(table.keys, table.values):
        methods.setdefault(function.id, []).append(flag.value)
    told = {}
    parts = sections((HERE / "docs" / "baselines.md").read_text(), 2)
    for _, part in parts:
        for title, body in sections(part, 3):
            if match := re.match(r"([\w-]+) (D\d+):", title):
                told.setdefault(match[1], {})[match[2]] = body
    out, shown = [], [(title, part) for title, part in parts[1:] if not re.match(r"### [\w-]+ D\d+:", part[part.find("### "):])]
    stop = text[: text.index("METHODS = {")].count("\n")
    for i, node in enumerate(functions):
        if node.name not in methods:
            continue
        flags, own = methods[node.name], ast.get_docstring(node, clean=False)
        first = node.body[0]
        lines = [*range(node.lineno, first.lineno), *range(first.end_lineno + 1, node.end_lineno + 1)]
        helpers, j = [], i + 1
        while j < len(functions) and functions[j].name not in methods and functions[j].lineno < stop:
            helpers += [*range(functions[j].lineno, functions[j].end_lineno + 1)]
            j += 1
        key = f"{flags[0]}-"
        after = f"<details><summary>functions that {node.name} calls</summary>{code_side('baselines.py', helpers, key + 'x')}</details>" if helpers else ""
        head = own.split("\n\n")[0]
        section = next((part for title, part in parts if f"`{flags[0]}`" in title), "")
        words = markdown(sections(section, 3)[0][1])
        out.append(f'<section id="{flags[0]}"><h2>{", ".join(flags)}</h2><p class="cite">{html.escape(" ".join(head.split()))}</p>\n'
                   f"{listing('baselines.py', own, lines, next(told[flag] for flag in reversed(flags) if flag in told), key, after)}\n{words}</section>")
    shared = [n for node in functions if node.lineno < next(f.lineno for f in functions if f.name in methods)
              for n in range(node.lineno, node.end_lineno + 2)]
    about = [f"<p>{mathematics(' '.join(part.split()))}</p>" for part in doc.split("\n\n")[3:6]]
    toc = " ".join(f'<a href="#{flags[0]}">{", ".join(flags)}</a>' for flags in methods.values())
    body = (f'<header><h1>{PAPERS["baselines"]}</h1><p class="cite">The methods that the papers compare with. One function each, in one file.</p>{HINT}'
            f'<p class="toc">{toc}</p></header>\n{fold("Symbols and models", "".join(about))}\n'
            + fold("What several methods share: gradients, steps, parts of w", '<div class="code">' + code_side("baselines.py", shared, "shared-") + "</div>")
            + "\n".join(out) + below("baselines", shown))
    return page("baselines", "Baselines: pseudocode beside code", body)


def index_page():
    ideas = dict(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \| (.*?) \|", (HERE / "README.md").read_text(), re.M))
    cards = "".join(f'<a class="card" href="{name}.html"><b>{title}</b> {html.escape(ideas[name])}</a>' for name, title in PAPERS.items())
    title, text = (HERE / "docs" / "first-hour.md").read_text().split("\n", 1)
    others = " ".join(f'<a href="{path.name}">{path.stem}</a>' for path in sorted((HERE / "docs").glob("*.md")) if path.stem not in (*PAPERS, "first-hour"))
    body = ("<header><h1>Federated learning, one file per paper</h1><p>Each page shows a paper's pseudocode beside the code that carries it out, the choices "
            f'that change a number, what was measured, and exercises.</p></header>\n<div class="cards">{cards}</div>\n'
            f'<section><h2>{title.strip("# ")}</h2>{markdown(text)}</section>\n<p>More pages, as plain text: {others}</p>')
    return page("index", "Federated learning, one file per paper", body)


def pages():
    """{file name: text} of all pages."""
    made = {"index": index_page(), **{name: paper_page(name) for name in PAPERS if name != "baselines"}, "baselines": baselines_page()}
    return {f"{name}.html": text for name, text in made.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / "docs" / name).write_text(text)
        print(f"page    docs/{name}")
