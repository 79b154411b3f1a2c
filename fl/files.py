"""Other people's files: what --model, --split and --methods name as path/to/file.py:NAME."""

import ast
import importlib.util
import os
import pathlib
import random
import sys

import numpy as np
import torch

from .machine import first_line, refuse

HERE = pathlib.Path(__file__).resolve().parent.parent
OURS = "fedavg", "fedavgm", "superfed", "psinet", "fedslr", "persfl", "baselines"
OTHERS = "common", "compare", "fl", "comparing", "papers", "checks", "tests"  # of HERE, too
LOADED = {}  # a file: the contents with which it was loaded, and its module


def find(flag, name, known):
    """Returns what --model NAME or --split NAME means: one of `known`, or an object of a file,
    path/to/file.py:NAME."""
    path, colon, inside = name.rpartition(":")
    if name in known:
        return known[name]
    if name.endswith(".py"):
        refuse(f"--{flag} {name} names nothing in the file; use {name}:NAME")
    if not colon:
        more = ", torchvision:NAME" if flag == "model" else ""
        refuse(f"--{flag} {name} is unknown; use one of {', '.join(known)}{more}, or "
               "path/to/file.py:NAME")
    if not hasattr(load_file(path), inside):
        refuse(f"--{flag} {name}: {path} has no {inside}")
    return getattr(load_file(path), inside)


def load_file(path):
    """Returns the module of a .py file, which may lie anywhere and import what lies beside it. It
    is loaded anew if it, or one of these, has changed. Refuses what can't be loaded."""
    path = pathlib.Path(path)
    if path.suffix != ".py" or not path.is_file():
        refuse(f"there is no file {path} that ends in .py")
    file, folder = path.resolve(), str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    helpers = beside(file)
    for name, own in helpers.items():
        spec = "." not in name and importlib.util.find_spec(name)
        if spec and (found := os.path.realpath(spec.origin)) != str(own):
            refuse(f"{path} imports {name}, which can be {own} or {found}; rename one of them")
    contents = [own.read_bytes() for own in (*helpers.values(), file)]
    if LOADED.get(file, [None])[0] != contents:
        for name in helpers:
            sys.modules.pop(name, None)
        LOADED[file] = contents, execute(path)
    return LOADED[file][1]


def execute(path):
    """Returns the module that a file makes."""
    spec = importlib.util.spec_from_file_location(str(path).replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    try:
        fresh(lambda: spec.loader.exec_module(module))
    except Exception as problem:  # whatever the file does
        why = f"{type(problem).__name__}: {first_line(problem)}"
        if "relative import" in why:
            why += "; a file is loaded alone: write `import a` or `from a import b`, without a dot"
        refuse(f"{path} can't be loaded: {why}")
    return module


def beside(file, root=None, found=None):
    """Returns {name: file} of the modules in its folder that a file imports, wherever it does so,
    or that these do; the name is a.b of a/b.py. Nothing of this repository."""
    root, found = root or file.parent, {} if found is None else found
    for level, name in imports(file):
        place = file.parents[level - 1] if level else root
        if place == HERE and name.split(".")[0] in (*OURS, *OTHERS):
            continue
        for part in name.split("."):
            place /= part
            for own in (place.parent / f"{part}.py", place / "__init__.py"):
                if own.is_file() and root in own.parents and own not in found.values():
                    found[".".join(place.relative_to(root).parts)] = own
                    beside(own, root, found)
    return found


def imports(file):
    """Returns (level, name) of all that a file imports: a.b.c for `from a.b import c`. level: how
    many dots stand before it."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # it fails when it is executed, or is never executed
        return []
    return [(0, z.name) for node in nodes if isinstance(node, ast.Import) for z in node.names] + [
        (node.level, f"{node.module}.{z.name}" if node.module else z.name)
        for node in nodes if isinstance(node, ast.ImportFrom) for z in node.names]


def fresh(build, seed=0):
    """Returns build(), which draws from torch, numpy or random with this seed. What it does not
    initialise is NaN."""
    before = random.getstate(), np.random.get_state()
    strict = torch.get_deterministic_debug_mode()
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
        try:
            return build()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_deterministic_debug_mode(strict)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
