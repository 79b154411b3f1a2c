"""Where a result comes from: source files, their hashes, the commit, versions and the device."""

import hashlib
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

import numpy as np
import torch

from .files import OURS, beside, imports
from .machine import device_name, refuse

ROOT = pathlib.Path(__file__).resolve().parent.parent
# the files, beside the algorithm's, on which a result depends: not those that read data sets, which
# have fingerprints, that refuse, and that write or draw
OTHERS = ("child", "formats", "own_method", "own_network", "plots", "provenance", "records",
          "shapes")
SHARED = "common.py", *(f"fl/{path.name}" for path in sorted((ROOT / "fl").glob("[a-z]*.py"))
                        if path.stem not in OTHERS)


def sources(file, args):
    """Returns {name: path} of the files on which a run depends, the algorithm's first: this
    repository's, those of --model, --split and --init, and what these import beside them or of our
    algorithms. Refuses two files of one name."""
    own = [name.rpartition(":")[0] for name in (args.model, args.split) if ".py:" in name]
    importing = [pathlib.Path(name).resolve() for name in (*own, file)]
    own += [args.init] if args.init else []
    found = {pathlib.Path(file).name: pathlib.Path(file)}
    for name, path in (*((name, ROOT / name) for name in SHARED),
                       *((path.name, path) for path in map(pathlib.Path, own))):
        if found.setdefault(name, path).resolve() != path.resolve():
            refuse(f"two files of this run are called {name}: the record names files by their "
                   "names; rename yours")
    for path in importing:
        helpers = beside(path).values()
        for module in helpers:
            found.setdefault(module.relative_to(path.parent).as_posix(), module)
        for name in {name.split(".")[0] for own in (path, *helpers) for _, name in imports(own)}:
            if name in OURS:
                found.setdefault(f"{name}.py", ROOT / f"{name}.py")
    return found


def command(file, argv):
    """Returns the command of a run without --resume, relative to this repository; None if it was
    not made from a command line."""
    path = pathlib.Path(file).resolve()
    path = path.relative_to(ROOT) if ROOT in path.parents else path
    if argv is None:
        return None
    return shlex.join([str(path), *(word for word in argv if word != "--resume")])


def identity(federation):
    """Returns what a state must share with the run that resumes it."""
    args = {name: str(z) if isinstance(z, os.PathLike) else z
            for name, z in vars(federation.args).items()}
    args |= {"device": federation.device.type, "clients": federation.K}  # a split may find its own
    for name, z in args.items():
        try:
            json.dumps(z)
        except TypeError:
            refuse(f"args.{name} is a {type(z).__name__}, which a record can't hold; keep it in a "
                   "variable of your own")
    return {"args": args,
            "data": federation.data.fingerprint(), "split": federation.split_fingerprint,
            "network": [[name, list(shape)] for name, _, shape in federation.net.tensors]}


def environment(files, federation):
    """Returns the environment of a record. files: {name: path} of `sources`."""
    return {
        "python": platform.python_version(), "torch": str(torch.__version__),
        "numpy": np.__version__, "cuda": torch.version.cuda,
        "device": device_name(federation.device), "processes": federation.training.processes,
        "commit": commit(files.values()),
        "sources": hashes(files),
    }


def hashes(files):
    """Returns {name: hash of the contents} of {name: path}."""
    return {name: hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
            for name, path in files.items()}


def git(*words):
    """Returns the exit code and the output of git in this checkout."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    except OSError:  # no git
        return 1, ""
    return done.returncode, done.stdout


def commit(files):
    """Returns the git commit of this checkout, with + if one of the files differs from it; None
    without one."""
    code, head = git("rev-parse", "HEAD")
    failed, found = git("status", "--porcelain", "--ignored", "--",
                        *(pathlib.Path(path).resolve() for path in files))
    # git fails on a file elsewhere
    return None if code else head.strip() + ("+" if found or failed else "")


def changes(files):
    """Returns the set of those files of this checkout that differ from its commit."""
    _, found = git("status", "--porcelain", "-z", "--no-renames", "--", *files)
    return {ROOT / line[3:] for line in found.split("\0") if line}


def whose(file):
    """Returns of an algorithm's file: "ours", as it was committed; "ours?", where nobody can tell;
    or "own", a user's or changed by one."""
    path = pathlib.Path(file).resolve()
    if path.stem not in OURS or path.parent != ROOT:
        return "own"
    made = commit([path])
    return "ours?" if made is None else "own" if made.endswith("+") else "ours"


def peak_memory(device):
    """Returns the most memory that was in use, in MiB: the GPU's, or this process's; None where the
    system does not say it."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**(20 if sys.platform == "darwin" else 10), 1)
