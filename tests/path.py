"""What a reader opens to follow one round of an algorithm: the functions that it runs outside of its own file, and their lines.

    python tests/path.py fedavg            (or fedavgm, superfed, psinet, fedslr, persfl, or scaffold and other methods)

Runs two small rounds on the embedded images on a CPU, and notes each function of this project that the second one enters, from
the sampling of the clients until the round is kept. Lines are those of code: no docstrings, comments or empty lines. Evaluation,
the split, the models and the images are not part of it, nor is writing to disk.
"""

import ast
import contextlib
import importlib
import io
import pathlib
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
QUICK = ["--dataset", "shapes", "--limit", "400", "--clients", "4", "--rounds", "3", "--eval-every", "3", "--device", "cpu"]
MORE = {"superfed": ["--start", "0"], "persfl": ["--distill-epochs", "1"]}
# not the algorithm's way: models and transforms, which have sections of their own; logging
NOT = {"Net", "Weights", "evaluate", "evaluate_clients", "logits", "score", "describe"}


def code_lines(path):
    """{first line of a function: (its name, its lines of code)}"""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            doc = node.body[0] if ast.get_docstring(node) is not None else None
            skipped = range(doc.lineno, doc.end_lineno + 1) if doc else ()
            kept = [n for n in range(node.lineno, node.end_lineno + 1)
                    if n not in skipped and lines[n - 1].strip() and not lines[n - 1].strip().startswith("#")]
            found[node.lineno] = node.name, len(kept)
    return found


def entered(name):
    """{(file, function): lines of code} of what round 2 enters."""
    import common

    file = name if (HERE / f"{name}.py").exists() else "baselines"
    own = [] if file == name else ["--method", name]
    seen, active = {}, False
    known = {path.name: code_lines(path) for path in HERE.glob("*.py")}

    def trace(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if active and event == "call" and path.parent == HERE and path.name != f"{file}.py":
            line = frame.f_code.co_firstlineno
            while line not in known[path.name] and line < frame.f_code.co_firstlineno + 5:
                line += 1  # behind decorators
            if line in known[path.name]:
                function, count = known[path.name][line]
                seen[path.name, function] = count
        return None

    train_round = common.Run.begin_round
    evaluates = common.Run.evaluates

    def begin_round(run, t):
        nonlocal active
        active = t == 1
        return train_round(run, t)

    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        common.Run.begin_round = begin_round
        sys.setprofile(trace)
        threading.setprofile(trace)
        try:
            importlib.import_module(file).main([*own, *QUICK, *MORE.get(file, []), "--parallel", "1", "--out", out])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            common.Run.begin_round = train_round
    return seen


if __name__ == "__main__":
    for name in sys.argv[1:] or ["fedavg"]:
        seen = entered(name)
        for (path, function), count in sorted(seen.items()):
            print(f"{path + ':':<14}{function:<24}{count:>4}")
        print(f"{name}: {sum(seen.values())} lines in {len(seen)} functions outside of its file\n")
