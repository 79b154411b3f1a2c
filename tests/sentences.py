"""Lists, for an editor, the words of README.md, docs/*.md and the docstrings and comments of the
top-level *.py files, and the sentences in which it finds no verb: `python tests/sentences.py`. With
names of files it also prints these sentences."""

import inspect
import pathlib
import re
import sys

from markdown_it import MarkdownIt

HERE = pathlib.Path(__file__).resolve().parent.parent
VERBS = """is are was were be been has have had do does did can could may might must should will
would cannot [a-z]+n't began came chose found gave knew ran took add agree become begin belong
choose come compare compute contain depend describe determine differ diverge divide exclude exist
expect explain follow get give go grow happen ignore include join keep know learn let lie lose make
minimise move multipl(?:y|ie) need overestimate pay pull put reach receive refuse rise seek send
serve shrink subtract suggest take tell think travel tr(?:y|ie) want write"""
# Without an -s these may be nouns or participles, and count only where a verb can stand.
STEMS = """act allow answer appl(?:y|ie) ask average beat bound break build call change check claim
connect cop(?:y|ie) correct cost count cover cut deal decay decide double draw drop end equal
estimate evaluate fail fall fill fit fix flip gain help hold implement lack lead leave list look
lower mark match mean measure mix name normalise order own pass plot point predict print prune read
repeat replace report return round run sample save say scale score see set share show shuffle stand
start state stay step stop sum test train turn update use var(?:y|ie) weight work"""
BEFORE = r"(?:^|[,;:(] |\b(?:\w\w+s|and|both|it|let|not|only|or|so|that|then|they|we|which|who) )"
ANY, STEM = (re.sub(r"\s+", "|", f"(?:{words})") for words in (VERBS, STEMS))
VERB = re.compile(rf"\b{ANY}(?:e?s)?\b|\b{STEM}e?s\b|{BEFORE}(?:{ANY}|{STEM})(?:\w?e?d)?\b", re.I)


def texts(path):
    """What one reads in a file: a page, or a program's docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    found = re.findall(r'"""((?s:.*?))"""|# (.*(?:\n *# .*)*)', source)
    of_code = [inspect.cleandoc(doc) or re.sub("\n *# ", "\n", note) for doc, note in found]
    return [source] if path.suffix == ".md" else of_code


def words(path):
    return sum(len(text.split()) for text in texts(path))


def without_verb(path):
    """Items of lists (with no full stop, or a colon behind the first word) are no sentences."""
    tokens = [t for text in texts(path) for t in MarkdownIt().enable("table").parse(text)]
    for before, token in zip(tokens, tokens[1:]):
        choices = re.findall(r"^D\d+  (.*(?:\n {4}\S.*)*)", token.content, re.M)
        for part in [token.content] if before.type == "paragraph_open" else choices:
            for sentence in re.split(r"(?<=[^.][.?!]) (?=[^a-z])", " ".join(part.split())):
                ends = re.search(r"[.?!]\W*$", sentence) and not re.match(r"\S+: ", sentence)
                if ends and not VERB.search(re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence)):
                    yield sentence


if __name__ == "__main__":
    pages = [HERE / "README.md", *sorted(HERE.glob("docs/*.md")), *sorted(HERE.glob("*.py"))]
    for path in [pathlib.Path(name).resolve() for name in sys.argv[1:]] or pages:
        found, name = list(without_verb(path)), path.relative_to(HERE)
        print(f"{name}: {words(path)} words, {len(found)} sentences without a verb")
        print("".join(f"    {sentence}\n" for sentence in found if sys.argv[1:]), end="")
