"""What a reader opens to follow one round of an algorithm: the functions that it runs outside of
its own file, and their lines.

    python tests/path.py fedavg     (or fedavgm, superfed, psinet, fedslr, persfl, scaffold, ...)

Runs small rounds on the embedded images on a CPU, and notes each function of this project that the
second one enters, from the sampling of the clients until the round is kept. Lines are those of
code: no docstrings, comments or empty lines. The networks, the transforms, the split, the
evaluation and writing to disk are not part of it.
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
QUICK = ["--dataset", "shapes", "--limit", "400", "--clients", "4", "--rounds", "3",
         "--eval-every", "3", "--device", "cpu"]
MORE = {"superfed": ["--start", "0"], "persfl": ["--distill-epochs", "1"]}
OTHERS = {"models.py", "data_sets.py", "splits.py", "plots.py"}


def functions(path):
    """[(first line, last line, name, lines of code)] of the functions of a file, without those
    inside of others."""
    text = path.read_text()
    lines, found = text.splitlines(), []
    evaluation = range(0)
    if path.name == "common.py":
        start, end = (text[: text.index(title)].count("\n")
                      for title in ("    # Evaluation\n", "# 3. Arguments\n"))
        evaluation = range(start, end)

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef):
                visit(child)
            elif child.lineno not in evaluation:
                doc = child.body[0] if ast.get_docstring(child) is not None else None
                inside = range(doc.lineno, doc.end_lineno + 1) if doc else ()
                body = [lines[n - 1].strip() for n in range(child.lineno, child.end_lineno + 1)
                        if n not in inside]
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                count = sum(line != "" and not line.startswith("#") for line in body)
                found.append((first, child.end_lineno, child.name, count))

    visit(ast.parse(text))
    return found


def entered(name):
    """{(file, function): lines of code} of what round 2 enters."""
    import common

    file = name if (HERE / f"{name}.py").exists() else "baselines"
    own = [] if file == name else ["--method", name]
    seen, active = {}, False
    known = {str(path): functions(path) for path in HERE.glob("*.py")
             if path.name not in OTHERS | {f"{file}.py"}}

    def trace(frame, event, _):
        if active and event == "call" and frame.f_code.co_filename in known:
            for first, last, function, count in known[frame.f_code.co_filename]:
                if first <= frame.f_code.co_firstlineno <= last:
                    seen[pathlib.Path(frame.f_code.co_filename).name, function] = count

    usual = common.Run.rounds

    def rounds(*args, **named):
        nonlocal active
        for t in usual(*args, **named):
            active = t == 1
            yield t

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        common.Run.rounds = rounds
        sys.setprofile(trace)
        threading.setprofile(trace)
        try:
            argv = [*own, *QUICK, *MORE.get(file, []), "--out", out]
            importlib.import_module(file).main(argv)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            common.Run.rounds = usual
    return seen


if __name__ == "__main__":
    for name in sys.argv[1:] or ["fedavg"]:
        seen = entered(name)
        for (path, function), count in sorted(seen.items()):
            print(f"{path + ':':<14}{function:<24}{count:>4}")
        print(f"{name}: {sum(seen.values())} lines in {len(seen)} functions outside of its file")
