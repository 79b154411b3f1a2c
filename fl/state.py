"""What survives a round: Rows, which clients keep, and the state on disk, from which --resume goes
on."""

import ast
import contextlib
import dis
import io
import itertools
import json
import pathlib
import pickle
import re
import sys
import zipfile
from types import FunctionType, GeneratorType

import numpy as np
import torch

from .files import beside
from .machine import first_line, free_memory, refuse
from .records import FREE

SEEDED = 'common.stream(args.seed, "algorithm", t, federation.K)'  # a loop's own generator
PLAIN = int, float, bool, str, type(None)  # types that a state and a record can hold


class Rows:
    """What the clients keep between rounds, a row each: [K, ...]. rows[S] copies the rows of the
    clients S (or of one) to the device; rows[S] = x replaces them.

    all: the whole tensor. It is made on the device if all Rows together take at most a quarter of
    its free memory, else in the host's memory. finite: whether all that the round has put into it
    is.
    """

    def __init__(self, K, first, device, others=()):
        """first(k): client k's row. others: the Rows that are there already."""
        like = first(0)
        size = like.nbytes * K
        near = sum(rows.all.nbytes for rows in others if not rows.far)
        self.far = 4 * (near + size) > free_memory(device) + near
        self.device, self.finite = device, True
        try:
            self.all = torch.empty((K, *like.shape), dtype=like.dtype,
                                   device="cpu" if self.far else device)
        except RuntimeError as problem:
            refuse(f"{K} clients keep {size / 1e9:.1f} GB ({first_line(problem)}); use fewer "
                   "--clients or a smaller --model", alone=True)
        for k in range(K):
            self.all[k] = first(k)

    def __len__(self):
        return len(self.all)

    def __getitem__(self, S):
        shape, index = self.index(S)
        return self.all.index_select(0, index).view(shape).to(self.device)

    def __setitem__(self, S, x):
        if not torch.is_tensor(x):
            refuse(f"rows[S] = x takes a tensor, not a {type(x).__name__}; rows[S] = other[T] "
                   "copies rows of other Rows")
        if not torch.can_cast(x.dtype, self.all.dtype):
            refuse(f"rows[S] = x: x is {x.dtype}, but the rows are {self.all.dtype}; begin with "
                   f"rows of that type, as per_client(torch.zeros(3, dtype={x.dtype}))")
        shape, index = self.index(S)
        if len(index.unique()) < len(index):
            refuse("rows[S] = x: a client is in S twice, and has one row")
        x = x.expand(shape)  # one row for all of S, or a row each
        self.finite = self.finite and is_finite(x)
        x = x.to(self.all.device, self.all.dtype).view(len(index), *self.all.shape[1:])
        self.all.index_copy_(0, index, x)

    def index(self, S):
        """Returns the shape of rows[S], and these rows' indices. S: as NumPy takes it, or a
        tensor."""
        S = S.cpu().numpy() if torch.is_tensor(S) else S
        S = np.arange(len(self.all))[S if np.size(S) else []]
        index = torch.from_numpy(np.atleast_1d(S)).to(self.all.device)
        return (*S.shape, *self.all.shape[1:]), index

    def of(self, S):
        """Returns self[S] for Federation.train, which fetches a row when its client's turn comes.
        """
        return Sampled(self, S)

    def sum(self, dim=0):
        """Returns the sum over the clients, [...]."""
        return self.all.sum(dim).to(self.device)


class Sampled:
    """Rows S of Rows or of a tensor, [m, ...], each fetched when it is asked for."""

    def __init__(self, rows, S):
        self.rows, self.S = rows, np.asarray(S)

    def __len__(self):
        return len(self.S)

    def __getitem__(self, i):
        return self.rows[self.S[i]]


def is_finite(z):
    """Returns whether a tensor or number, or all that a round has put into Rows, is finite.
    z.isfinite() would make tensors as large as z."""
    if isinstance(z, Rows):
        return z.finite
    z = torch.as_tensor(z if isinstance(z, float | torch.Tensor) else 0)
    return not z.numel() or bool(torch.stack(torch.aminmax(z)).isfinite().all())


def check(state, before, model, clients, all_rows):
    """Refuses a state that --resume can't restore. before: {name: a tensor like it, without
    values, else None} before the first round. model, clients: those of Run.rounds."""
    now = vars(state)
    for name in (model, clients):
        if isinstance(name, str) and name not in now:
            refuse(f"run.rounds: `state` has no {name}; it has {', '.join(now)}")
    if late := now.keys() - before.keys():
        refuse(f"the loop adds {', '.join(late)} to `state`; set every name before "
               "run.rounds(state)")
    for name, z in now.items():
        if not torch.is_tensor(z) and type(z) not in (Rows, *PLAIN):
            refuse(f"state.{name} is a {type(z).__name__}; keep tensors and Python's own numbers")
        then = before[name]
        if torch.is_tensor(z) and any(n > 1 and not step for n, step in zip(z.shape, z.stride())):
            refuse(f"state.{name} repeats a part of its memory (by expand); add .clone()")
        if then is None or not torch.is_tensor(z):
            continue
        if then.is_floating_point() and z.dtype != then.dtype:
            refuse(f"the loop makes state.{name} {z.dtype}, which began as {then.dtype}; convert "
                   f"what it is computed from, as noise.to({then.dtype}): NumPy's numbers are "
                   "float64")
        if name == model and z.dtype != torch.get_default_dtype():
            refuse(f"state.{name} is {z.dtype}, a model is torch.float32; use .float()")
        if name == model and z.shape != then.shape:
            refuse(f"the loop makes state.{name} {list(z.shape)}, which began as "
                   f"{list(then.shape)}; average the clients' models")
    if two := sharing(now.items()):
        refuse(f"state.{two[0]} and state.{two[1]} share their memory, which they would not "
               "after --resume; give one a .clone()")
    if any(all(rows is not z for z in now.values()) for rows in all_rows):
        refuse("what federation.per_client returns must be in `state`, or --resume would begin it "
               "anew; replace its rows by state.V[S] = x, not by state.V = x")


def sharing(named):
    """Returns the names of two tensors that share their memory, () if none do. named: (name, z) of
    each; what is no tensor is left out."""
    at = {}
    for name, z in named:
        if torch.is_tensor(z) and z.numel() and at.setdefault(z.data_ptr(), name) != name:
            return at[z.data_ptr()], name
    return ()


def overlapping(named):
    """Returns the names of two dense tensors that share a part of their memory, () if none do."""
    spans = sorted((z.data_ptr(), z.data_ptr() + z.nbytes, name) for name, z in named if z.numel())
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            return name, other
    return ()


COUNTS = "zip", "enumerate", "islice", "list", "sorted"  # what would count rounds on its own


def use_of_rounds(path):
    """Returns whether a file reads an attribute `rounds`, as of args; which of COUNTS stands around
    its run.rounds(...), "" if none does; and whether it reads `evaluates` without calling it."""
    nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    calls = [z for z in nodes if isinstance(z, ast.Call)]
    loops = {z for z in calls if getattr(z.func, "attr", "") == "rounds"}
    around = [name for z in calls if loops & {*ast.walk(z)} - {z} and (
        name := getattr(z.func, "id", getattr(z.func, "attr", ""))) in COUNTS]
    called = {z.func for z in calls}
    reads = {z.attr for z in nodes if isinstance(z, ast.Attribute)
             and isinstance(z.ctx, ast.Load) and z not in called}
    return "rounds" in reads, around[0] if around else "", "evaluates" in reads


READ_BY = {"momentum": {"momentum", "sgd"}, "weight_decay": {"weight_decay", "decayed"},
           "lr_decay": {"lr_decay", "eta"}}  # a flag, and the names that use it


def unread(path, ours, root):
    """Returns those flags of READ_BY that a file can't use: neither it nor the functions of `ours`
    (files in root) that it calls name them, and it gives its args to no other file's function that
    may."""
    def called(z):  # the module, if one is named, and the function of a call
        of = getattr(z.func, "value", None)
        return getattr(of, "id", ""), getattr(z.func, "attr", getattr(z.func, "id", ""))

    nodes, reads_none = [*ast.walk(ast.parse(path.read_bytes()))], {"Federation", "sgd"}
    imported = {z.asname or z.name: (x.module, z.name) for x in nodes
                if isinstance(x, ast.ImportFrom) for z in x.names}
    for module, name in [called(z) for z in nodes if isinstance(z, ast.Call)]:
        where, function = (module, name) if module else imported.get(name, ("", name))
        for z in ast.walk(ast.parse((root / f"{where}.py").read_bytes())) if where in ours else ():
            if isinstance(z, ast.FunctionDef) and z.name == function:
                nodes += ast.walk(z)
                reads_none.add(name)
    calls = [(called(z)[1], {getattr(x, "id", "") for x in (
        *z.args, *(word.value for word in z.keywords))})
             for z in nodes if isinstance(z, ast.Call)]
    args = {x for name, given in calls if name == "Federation" for x in given if x}
    reads_none |= {z.name for z in nodes if isinstance(z, ast.FunctionDef)}
    if not args or any(args & given for name, given in calls if name not in reads_none):
        return []
    named = {getattr(z, "attr", getattr(z, "value", "")) for z in nodes
             if isinstance(z, ast.Attribute | ast.Constant)} | {name for name, _ in calls}
    return [flag for flag, by in READ_BY.items() if not by & named]


def frames_of(file, helpers):
    """Returns the frames of the functions of a file and of modules beside it: of the loop, then of
    what has called it. tqdm, for instance, may stand between."""
    frame, found = sys._getframe(), []
    while frame:
        names = frame.f_globals
        if names.get("__file__") == file or names.get("__name__") in helpers:
            found.append(frame)
        frame = frame.f_back
    return found


def names_of_loop(frame):
    """Returns two sets: what a frame's loop may read in a round before it has set it, and the other
    names that it sets; None if it stands at no loop."""
    all_of_it = {z.offset: z for z in dis.get_instructions(frame.f_code)}
    loop = all_of_it.get(frame.f_lasti)
    if not loop or loop.opname != "FOR_ITER":
        return None
    body = {at: z for at, z in all_of_it.items() if loop.offset < at < loop.argval}
    following = dict(zip(body, [*body][1:]))
    early, stored, todo = set(), set(), [min(body)]
    surely = {min(body): frozenset()}  # an instruction: what is set on every way to it
    while todo:
        at = todo.pop()
        z, now = body[at], surely[at]
        verbs = re.findall("(LOAD|STORE)_(?:FAST|DEREF|CLOSURE|NAME|GLOBAL)(?!_AND)", z.opname)
        for verb, name in zip(verbs, z.argval if isinstance(z.argval, tuple) else [z.argval]):
            if verb == "STORE":
                now, stored = now | {name}, stored | {name}
            elif name not in now:
                early.add(name)
        ways = [] if re.match("JUMP_(?!IF)|RETURN|R?E?RAISE", z.opname) else [following.get(at)]
        ways += [z.argval] if z.opcode in (*dis.hasjrel, *dis.hasjabs) else []
        for way in body.keys() & ways:
            if (then := now & surely.get(way, now)) != surely.get(way):
                surely[way] = then
                todo.append(way)
    stored -= early
    return {*early, *frame.f_code.co_cellvars} - stored, stored


def watch(file, state):
    """A generator that refuses, at each next(), what a file's loop over run.rounds has changed
    beside its state, and --resume would begin anew: what the loop reads before it sets it, what its
    function's functions use, and the file's variables. Likewise of loops around this one and of the
    files beside."""
    helpers = beside(pathlib.Path(file).resolve())
    if not (frames := frames_of(file, helpers)):
        return
    loops = {frame.f_code: names_of_loop(frame) for frame in frames}
    if loops[frames[0].f_code] is None and "rounds" in frames[0].f_code.co_names:
        refuse("run.rounds(state) belongs in a `for`: write `for t in run.rounds(state)`")
    loops = {code: names or (set(), set()) for code, names in loops.items()}
    for frame in frames:
        if stale := [name for name, z in vars(state).items() if torch.is_tensor(z)
                     and name in loops[frame.f_code][0]
                     and sharing([(0, z), (1, frame.f_locals.get(name))])]:
            refuse(f"the loop reads {stale[0]}, which stays what it was before the loop; read "
                   f"state.{stale[0]}, or give the first one another name")
    before, set_anew = {}, set().union(*(stored for _, stored in loops.values()))
    modules = {*helpers, *(frame.f_globals["__name__"] for frame in frames)}
    while frames := frames_of(file, helpers):
        files = {id(z): z for z in [*(frame.f_globals for frame in frames), *(
            vars(sys.modules[name]) for name in helpers if name in sys.modules)]}
        found = {(name, at): z for at, names in files.items() for name, z in names.items()
                 if name not in set_anew and name[:2] != "__"}
        for frame in frames:
            here, code = frame.f_locals, frame.f_code
            found |= {(name, code): here[name]
                      for name in sorted(loops.get(code, [()])[0]) if name in here}
            if here is not frame.f_globals and type(here) is dict:
                here.clear()  # before Python 3.13 a copy, which would keep large tensors
        now = {key: Content(z, state, set_anew, modules) for key, z in found.items()}
        before = before or now
        if odd := [key for key, z in before.items() if now.get(key, z) != z]:
            name, _ = min(odd, key=lambda key: callable(found[key]))  # not who changes it
            refuse(f"the loop changes {name}, which --resume would begin anew; keep tensors and "
                   "numbers in `state`, record by run.log what is only to be read, and make "
                   f"generators in the loop, by {SEEDED}", alone=True)
        del frame, frames, here, found, now  # which would keep tensors
        yield


KNOWN = "builtins", "collections", "functools", "itertools", "numpy", "random", "torch", "types"


class Content(pickle.Pickler):
    """What may change of an object z, to be compared: its pickle, but of a tensor and of a large
    array the identity and version (if versions), and what functions hold, but by the names `but`.
    Nothing of ours and of `skipped`; with `modules` nothing of other libraries (a figure, a bar),
    and all that these modules' classes hold. tensors: those in it."""

    def __init__(self, z, skipped=None, but=(), modules=None, versions=True):
        self.file, self.tensors = io.BytesIO(), []  # which keep their numbers while they live
        self.skipped, self.but, self.modules, self.versions = skipped, but, modules, versions
        self.met = {}  # functions, classes and the like, which may hold themselves
        super().__init__(self.file)
        with contextlib.suppress(Exception):  # whatever somebody's object does
            self.dump(z)

    def __eq__(self, other):
        return self.file.getvalue() == other.file.getvalue()

    def persistent_id(self, z):
        name = type(z).__module__
        foreign = self.modules and name not in self.modules and name.split(".")[0] not in KNOWN
        if z is self.skipped or foreign or name.split(".")[0] in ("fl", "common"):
            return "skipped"
        if torch.is_tensor(z) or isinstance(z, np.ndarray) and z.nbytes > 10**7:
            self.tensors.append(z)
            return self.versions and (id(z), getattr(z, "_version", 0))

    def reducer_override(self, z):
        if id(z) in self.met:
            return repr, (self.met[id(z)][0],)
        self.met[id(z)], holds = (len(self.met), z), None
        if isinstance(z, torch.Generator):
            holds = z.get_state().tolist()
        elif isinstance(z, GeneratorType):
            holds = z.gi_frame and (z.gi_frame.f_lasti, z.gi_frame.f_locals)
        elif isinstance(z, FunctionType):
            cells = zip(z.__code__.co_freevars, z.__closure__ or ())
            but = *self.but, "__class__"  # a method with super() holds the class, which holds it
            holds = [x.cell_contents for name, x in cells if name not in but]
            holds = holds, z.__defaults__, vars(z)
        elif isinstance(z, type):
            own = z.__module__ in (self.modules or ())
            holds = z.__qualname__, own and [x for name, x in vars(z).items() if name[:2] != "__"]
        else:
            with contextlib.suppress(Exception):  # it can't be pickled
                z.__reduce_ex__(4)
                return NotImplemented
        return repr, (holds,)  # nobody calls it


def marks(named):
    """Returns {name: what tells whether it has changed} of {name: tensor, number, ...}."""
    return {name: Content(z) for name, z in named.items()}


def changed(before, named):
    """Returns the names of what has changed since `before`, which marks has returned."""
    return [name for name, z in before.items() if z != Content(named[name])]


def tensors_of(state):
    """Returns {name: tensor, or number} of a state, of Rows the whole tensor."""
    return {name: z.all if isinstance(z, Rows) else z for name, z in vars(state).items()}


def copies(state):
    """Returns {name: a tensor's copy, or number} of a state."""
    return {name: z.clone() if torch.is_tensor(z) else z for name, z in tensors_of(state).items()}


def differing(a, b):
    """Returns the names of the tensors that differ, by more than rounding, in two results of
    `tensors_of`. Numbers may be times."""
    return [name for name, x in a.items() if torch.is_tensor(x) and not (
        torch.is_tensor(y := b.get(name)) and x.shape == y.shape and torch.allclose(
            x, y.to(x.dtype)))]


def put(file, state, **more):
    """Writes a state, and more, into an open file."""
    tensors = tensors_of(state)
    tensors = {name: z.cpu() if torch.is_tensor(z) else z for name, z in tensors.items()}
    torch.save({"state": tensors, **more}, file)


def read(path, state, identity, environment, why_fixed):
    """Returns what `put` has written. Refuses the state of another run. identity: what a state must
    share with the run that resumes it. why_fixed: why --rounds can't change, or ""."""
    for z in vars(state).values():
        if isinstance(z, Rows):
            z.all = None  # makes room for what is read
    try:
        if zipfile.ZipFile(path).testzip():
            raise ValueError
        saved = torch.load(path, map_location="cpu", weights_only=True)
        then, done = facts(saved), len(saved["history"])
    except Exception as problem:  # torch.load raises nearly anything on a broken file
        refuse(f"{path} can't be read ({type(problem).__name__}); use another --out, or remove it",
               alone=True)
    if changes := saved.get("changes"):
        why_fixed = why_fixed or (f"as the last round it was evaluated, and this changed "
                                  f"state.{changes[0]}; change it before run.evaluates()")
    now = facts({**identity, "environment": environment})
    for name in {**then, **now}:
        a, b = then.get(name), now.get(name)
        why = f"belongs to {name} {a}, this run has {b}"
        if name in environment["sources"]:
            why = f"was made by another version of {name}"
        if name == "network":
            why = "belongs to a network whose parameters have other names or shapes"
        if name == "--rounds":
            a = b if done < b and not why_fixed else a  # more are welcome
            why += f": {why_fixed or f'{done} are done'}"
        if a != b:
            refuse(f"{path} {why}; use the same or another --out")
    return saved


def restore(state, saved, device):
    """Sets the state to what `read` has returned."""
    for name, z in saved["state"].items():
        if isinstance(rows := getattr(state, name), Rows):
            rows.all = z if rows.far else z.to(rows.device)
        else:
            setattr(state, name, z.to(device) if torch.is_tensor(z) else z)


def facts(saved):
    """Returns {name: value} of what a state and the run that resumes it must share."""
    flags = {"--" + name.strip("_").replace("_", "-"): value
             for name, value in saved["args"].items() if name not in FREE}
    sources = saved["environment"]["sources"]
    return {"file": next(iter(sources)), **flags, **sources, "data": saved["data"],
            "split": saved["split"], "network": json.dumps(saved["network"])}
