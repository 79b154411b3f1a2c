"""Guard: what is refused of a method of one's own, because --resume could not go on with it, or
because it would not do what its file says. Some of it of ours, too: somebody may have changed them.
Nothing here changes a result."""

import ast
import contextlib
import copy
import dis
import io
import itertools
import os
import pathlib
import pickle
import re
import sys
import tempfile
from types import FunctionType, GeneratorType

import numpy as np
import torch

from . import machine, provenance
from .child import REPEATS, Child
from .files import OURS, beside
from .machine import refuse, say
from .records import SHOWN
from .state import PLAIN, Rows, changed, tensors_of
from .transforms import TRANSFORMS

NOTHING = {"momentum": 0, "weight_decay": 0, "lr_decay": 1}  # values that do nothing
SEEDED = 'common.stream(args.seed, "algorithm", t, federation.K)'  # a loop's own generator


class Guard:
    """The checks of a Run, which calls these functions in their order."""

    def __init__(self, run, fixed_rounds):
        """fixed_rounds: that of Run; the attribute also says if the file names args.rounds."""
        self.run, self.args, self.fed = run, run.args, run.federation
        self.fixed_rounds = fixed_rounds
        path = pathlib.Path(run.file).resolve()
        self.ours = provenance.whose(path) != "own"
        if not self.ours:
            self.read(path)
        if not hasattr(self.args, "argv"):
            refuse(f"{path.name}: args are not those of common.parse(parser, BY_DATASET, argv), "
                   "which seeds and checks; use it in place of parser.parse_args(argv)")
        dealt = self.fed.training.given
        if odd := [name for name in dealt if getattr(self.args, name) != dealt[name]]:
            refuse(f"args.{odd[0]} has changed since Federation was made; set it before")
        if not self.ours and (odd := self.replaced()):
            run.note(f"note    federation.{odd[0]} has been replaced, which the record's --split, "
                     "--transform and fingerprints do not show")
        self.given = copy.deepcopy(vars(self.args))
        self.known = {*vars(self.fed), *vars(self.fed.net)}
        self.marked = self.data_now()
        # tensors of the state that no round has changed, and models that one has after evaluating
        self.still, self.late = {} if self.ours else None, set()

    def read(self, path):
        """Refuses what can be seen in the file."""
        uses, around, uncalled = use_of_rounds(path)
        uses = [path] * uses + [z for z in beside(path).values() if use_of_rounds(z)[0]]
        if self.fixed_rounds is None and uses:
            self.fixed_rounds = f"{uses[0].name} uses args.rounds"
        if around:
            refuse(f"{path.name}: {around} around run.rounds would begin anew after --resume; "
                   "write `for t in run.rounds(state)`: t counts the rounds from 0, and "
                   "schedule[t] takes the place of zip")
        if uncalled:
            refuse(f"{path.name}: run.evaluates without () is always true; write run.evaluates()")
        said = {word.split("=")[0] for word in getattr(self.args, "argv", ())}
        useless = [name for name in unread(path)
                   if (getattr(self.args, name) != NOTHING[name] if name in NOTHING
                       else "--lr" in said)]
        if useless:
            remedy = "federation.eta(t)" if useless[0] in ("lr", "lr_decay") else (
                "what common.sgd(args, net.decayed) returns")
            if (none := NOTHING.get(useless[0])) is not None:
                remedy += f", or {none} (compare.py: --set NAME.{useless[0]}={none})"
            refuse(f"{path.name} does not read --{useless[0].replace('_', '-')}, which would "
                   f"change nothing; use {remedy}")

    def replaced(self):
        """Returns the names of what a user has put in the place of the federation's own."""
        fed, args = self.fed, self.args
        split, transform = fed.split, TRANSFORMS[args.transform](fed.data)
        same = {name: torch.equal(getattr(fed, name).cpu(),
                                  torch.from_numpy(getattr(fed.data, name)))
                for name in ("images", "labels")}
        same["split"] = np.array_equal(np.concatenate([*split.train, *split.val]), fed.dealt) and (
            args.limit_test or split.fingerprint() == fed.split_fingerprint)
        same["transform"] = getattr(fed.transform, "__code__", None) is transform.__code__
        return [name for name in same if not same[name]]

    def begin(self):
        """Looks at a state that is not restored yet."""
        run = self.run
        self.began = {name: z.to("meta") if torch.is_tensor(z) else None
                      for name, z in vars(run.state).items()}
        self.check_state()
        self.outside, self.again = watch(run.file, run.state), self.repetition()
        next(self.outside, None)
        self.expected = torch.load(os.environ[REPEATS]) if os.environ.get(REPEATS) else {}
        self.expect(self.expected.get("first", {}), "began with")

    def next_round(self):
        """Before each round, and after the last one. Ends a process that has repeated its rounds.
        """
        next(self.outside, None)
        if self.expected and len(self.run.history) == self.expected["rounds"]:
            self.expect(self.expected["after"], "gave")
            os.remove(os.environ[REPEATS])
            raise SystemExit
        next(self.again, None)

    def begin_round(self):
        """Remembers what torch's, NumPy's and Python's generators are and, of a user's method, the
        global model with its version."""
        now = vars(self.run.state)
        w = None if self.ours else now.get(self.run.model)
        if self.still is None:
            self.still = sums(self.run.state, tensors_of(self.run.state))
        self.before = machine.generators(self.fed.device), w, getattr(w, "_version", 0)

    def end_round(self):
        """Refuses what the loop has changed beside its state."""
        (generators, w, version), model = self.before, self.run.model
        self.check_state()
        if odd := [name for name, z in vars(self.args).items() if self.given.get(name) != z]:
            refuse(f"args.{odd[0]} has changed since Run was made, and the record has the old "
                   f"value; set it before, or use state.{odd[0]}")
        parts = self.fed, self.fed.net
        added = {name for part in parts for name in vars(part) if not hasattr(type(part), name)}
        if added := added - self.known:
            refuse(f"the loop sets `{min(added)}` on federation or its net, which --resume would "
                   f"not restore; use state.{min(added)}")
        if odd := [name for name, z in self.data_now().items() if self.marked[name] != z]:
            refuse(f"federation.{odd[0]} has changed since Run was made, which --resume would not "
                   "restore; --split takes a function of yours, `train` takes other images, and "
                   "client_update may change b")
        if getattr(w, "_version", version) != version:
            refuse(f"the loop changes state.{model} in place, and every other name for it; "
                   f"write state.{model} = state.{model} + ...")
        now = tensors_of(self.run.state)
        found = sums(self.run.state, self.still)
        self.still = {name: z for name, z in self.still.items() if found[name] == z}
        if not self.ours and self.run.row.keys() & SHOWN.keys():
            self.late |= {model, self.run.models} & {*changed(self.run.measured, now)}
        if not self.run.history and not self.ours:
            self.check_models()
        if generators != machine.generators(self.fed.device):
            refuse("the loop draws from torch's, NumPy's or Python's generator, so the same "
                   f"command would give other results; draw from {SEEDED}", alone=True)

    def check_state(self):
        run = self.run
        check(run.state, self.began, run.model, run.models, self.fed.all_rows)

    def data_now(self):
        """Returns {name: Content of what a user's loop must not change} of the federation."""
        fed = self.fed
        named = {} if self.ours else {
            "images": fed.images, "labels": fed.labels, "n": fed.n, "split": [*fed.split],
            "transform": id(fed.transform), "everyone": fed.everyone}
        return {name: Content(z) for name, z in named.items()}

    def remarks(self):
        """Returns what a user should know of a loop that has ended, a line each."""
        if self.ours or not self.run.history:
            return []
        training, m = self.fed.training, self.fed.m
        notes = [f"no round has changed state.{name}" for name in self.still or ()]
        notes += [f"a round changes state.{name} after run.evaluates(), so the measures are those "
                  "of the one before" for name in self.late]
        if training.fewer:
            used, whole = training.fewer
            notes.append(f"client_update has used {used} of the {whole} images of its epochs in "
                         "one call of train; is `return` inside a loop?")
        if training.double:
            notes.append(f"federation.train had client {training.double[0]} twice in one S; rng."
                         "choice(K, m, replace=False) draws different ones")
        if training.twice:
            notes.append("client_update goes through `epochs` more than once, in one order of "
                         "images; is its loop in another? epochs.again(order=1) has a new order")
        if training.epochs and self.args.epochs not in training.epochs and any(
                word.split("=")[0] == "--epochs" for word in self.args.argv):
            notes.append(f"no call of federation.train has had the {self.args.epochs} epochs of "
                         "--epochs")
        if training.sizes and m not in training.sizes:
            notes.append(f"federation.train had {min(training.sizes)} clients in place of the {m} "
                         "of --fraction")
        if self.run.targets and not any("top1" in row for row in self.run.history):
            notes.append("no round has called run.stop_at_target, so --target does nothing")
        return notes

    def check_models(self):
        """Refuses clients' models that --fine-tune or --save-clients could not use in the end."""
        named = [name for name in ("save_clients", "fine_tune") if getattr(self.args, name)]
        models = self.run.models
        if models and named and vars(self.run.state).get(models, 0) is not None:  # None: not yet
            first = self.run.clients_models()(self.fed.everyone[:1])
            if first.shape[:-1] != (1,) or first.shape[-1] < self.fed.net.d:
                refuse(f"--{named[0].replace('_', '-')} needs the clients' whole models, "
                       f"[1, {self.fed.net.d}] for the first one, but run.rounds was given "
                       f"{list(first.shape)}; `clients` may be a function of S")

    # Rounds that are run a second time

    def repetition(self):
        """A generator that repeats rounds 2 and 3, and the last two, in new processes, each from
        the state before them, and refuses another result. For a method, model or split of a user's
        own, on a CPU: a GPU may round differently. next() before each round."""
        run, history = self.run, self.run.history
        own = not self.ours or any(".py:" in z for z in (self.args.model, self.args.split))
        size = sum(getattr(z, "nbytes", 0) for z in tensors_of(run.state).values())
        if (not own or not run.command or size > 1e9 or REPEATS in os.environ
                or self.fed.device.type != "cpu" or machine.world_size() > 1):
            return
        first = {} if history else {f"state.{name}": z for name, z in copies(run.state).items()}
        for n in sorted({min(3, run.last), run.last}):
            while len(history) < min(max(n - 2, 1), n - 1):
                yield
            if len(history) < n:
                with tempfile.TemporaryDirectory() as folder:
                    run.put_state(f"{folder}/state.pt")
                    while len(history) < n:  # what a round gives, the next one uses
                        yield
                    self.repeat(n, first, pathlib.Path(folder))

    def repeat(self, n, first, folder):
        """Repeats the rounds to n from the state in a folder. first: that before round 1."""
        run, files = self.run, provenance.sources(self.run.file, self.args)

        def edited():
            return provenance.hashes(files) != run.environment["sources"]

        if edited():
            return say(f"note    one of its files has changed while it runs, so round {n} is not "
                       "repeated")
        say(f"try     round {n} runs a second time, in a new process, to see whether --resume "
            "would give the same")
        file = folder / "expected.pt"
        torch.save({"first": first, "rounds": n, "after": self.found()}, file)
        early = n <= 3 and not self.fixed_rounds  # the last round of more than three is measured
        more = [f"--rounds={self.args.rounds + 1}"] if early else []
        child = Child([run.file, *self.args.argv, *more, "--resume", f"--out={folder}"],
                      **{REPEATS: str(file)})
        try:
            code, said = child.result()
        finally:
            child.stop()
        if code and edited():
            return say("note    that failed, and one of its files has changed meanwhile")
        if "belongs to split" in said:
            refuse("--split gives other clients in a new process; draw from rng, its argument, and "
                   "sort what is a set", alone=True)
        if code:
            refuse(f"round {n} was repeated in a new process, as --resume would: {said}",
                   alone=True)
        if file.exists():
            say(f"note    python {run.file} trains nothing, so no round was repeated")

    def found(self):
        """Returns {name: tensor, or number} of the state, and the measures of this round, if it was
        evaluated."""
        row = self.run.history[-1] if self.run.history else {}
        return {f"state.{name}": z for name, z in tensors_of(self.run.state).items()} | {
            f"{part} {name}": torch.tensor(z) for part in SHOWN
            for name, z in row.get(part, {}).items()}

    def expect(self, tensors, what):
        """Refuses a state, or losses, that differ from these tensors."""
        found = self.found()
        tensors = {name: z for name, z in tensors.items() if " " not in name or name in found}
        if odd := differing(tensors, found):
            rounds = "" if self.fixed_rounds else (
                "; if the number of --rounds matters, Run takes fixed_rounds=WHY")
            refuse(f"it {what} another {odd[0]}; something beside `state` has changed (a file, a "
                   "cache, the time, the order of a set, what threads share), or numbers are drawn "
                   "without a seed; keep tensors and numbers in `state`, and make generators in "
                   f"the loop, by {SEEDED}{rounds}", alone=True)


# --------------------------------------------------------------------------------------------------
# The file, as it is written


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


READ_BY = {  # a flag, and the names that use it
    "lr": {"lr", "eta"}, "lr_decay": {"lr_decay", "eta"}, "momentum": {"momentum", "sgd"},
    "weight_decay": {"weight_decay", "decayed"}}


def unread(path):
    """Returns those flags of READ_BY that a file can't use: neither it nor the functions of our
    files that it calls name them, and it gives its args to no other file's function that may."""
    def called(z):  # the module, if one is named, and the function of a call
        of = getattr(z.func, "value", None)
        return getattr(of, "id", ""), getattr(z.func, "attr", getattr(z.func, "id", ""))

    nodes, reads_none = [*ast.walk(ast.parse(path.read_bytes()))], {"Federation", "sgd"}
    imported = {z.asname or z.name: (x.module, z.name) for x in nodes
                if isinstance(x, ast.ImportFrom) for z in x.names}
    for module, name in [called(z) for z in nodes if isinstance(z, ast.Call)]:
        where, function = (module, name) if module else imported.get(name, ("", name))
        source = provenance.ROOT / f"{where}.py" if where in OURS else os.devnull
        for z in ast.walk(ast.parse(pathlib.Path(source).read_bytes())):
            if isinstance(z, ast.FunctionDef) and z.name == function:
                nodes += ast.walk(z)
                reads_none.add(name)
    loaded = {z.id for z in nodes if isinstance(z, ast.Name) and isinstance(z.ctx, ast.Load)}
    idle = {id(x) for z in nodes if isinstance(z, ast.Assign) and isinstance(z.value, ast.Call)
            and called(z.value)[1] == "sgd"
            and not loaded & {getattr(name, "id", "") for name in z.targets}
            for x in ast.walk(z)}
    nodes = [z for z in nodes if id(z) not in idle]  # without a common.sgd that nobody calls
    calls = [(called(z)[1], {getattr(x, "id", "") for x in (
        *z.args, *(word.value for word in z.keywords))})
             for z in nodes if isinstance(z, ast.Call)]
    args = {x for name, given in calls if name == "Federation" for x in given if x}
    reads_none |= {z.name for z in nodes if isinstance(z, ast.FunctionDef)}
    if not args or any(args & given for name, given in calls if name not in reads_none):
        return []
    keys = {id(key) for z in nodes if isinstance(z, ast.Dict) for key in z.keys}
    named = {getattr(z, "attr", getattr(z, "value", "")) for z in nodes if id(z) not in keys
             and isinstance(z, ast.Attribute | ast.Constant)} | {name for name, _ in calls}
    return [flag for flag, by in READ_BY.items() if not by & named]


# --------------------------------------------------------------------------------------------------
# The state


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
        if torch.is_tensor(z) and z.is_inference():
            refuse(f"state.{name} comes from torch.inference_mode, so it can't be trained; use "
                   "torch.no_grad")
        then = before[name]
        if torch.is_tensor(z) and any(n > 1 and not step for n, step in zip(z.shape, z.stride())):
            refuse(f"state.{name} repeats a part of its memory (by expand); add .clone()")
        if then is None or not torch.is_tensor(z):
            continue
        if then.is_floating_point() and z.dtype != then.dtype:
            refuse(f"the loop makes state.{name} {z.dtype}, which began as {then.dtype}; convert "
                   f"what it is computed from, as noise.to({then.dtype}); NumPy's numbers and "
                   "federation.losses are float64")
        if name == model and z.dtype != torch.get_default_dtype():
            remedy = ("leave torch's default type" if z.dtype == torch.float32 else
                      "a model is torch.float32; use .float()")
            refuse(f"state.{name} is {z.dtype}, {remedy}")
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


# --------------------------------------------------------------------------------------------------
# What the loop changes beside its state


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
        held = [(name, x) for name in loops[frame.f_code][0] if callable(frame.f_locals.get(name))
                for x in Content(frame.f_locals[name], state).tensors]
        if stale := [(name, of) for of, z in vars(state).items() for name, x in held
                     if torch.is_tensor(z) and sharing([(0, z), (1, x)])]:
            name, of = stale[0]
            refuse(f"the loop calls {name}, which holds state.{of} as it was before the loop; give "
                   f"it the present one, or state.{of}.clone() if the first is meant")
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


# --------------------------------------------------------------------------------------------------
# What has changed


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
            counted = torch.is_tensor(z) and not z.is_inference()
            return self.versions and (id(z), z._version if counted else 0)

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


def sums(state, names):
    """Returns {name: its sum} of the tensors of a state with these names."""
    return {name: float(z.sum(dtype=torch.float64)) for name, z in tensors_of(state).items()
            if name in names and torch.is_tensor(z) and not z.is_complex()}


def copies(state):
    """Returns {name: a tensor's copy, or number} of a state."""
    return {name: z.clone() if torch.is_tensor(z) else z for name, z in tensors_of(state).items()}


def differing(a, b):
    """Returns the names of the tensors that differ, by more than rounding, in two results of
    `tensors_of`. Numbers may be times."""
    return [name for name, x in a.items() if torch.is_tensor(x) and not (
        torch.is_tensor(y := b.get(name)) and x.shape == y.shape and torch.allclose(
            x, y.to(x.dtype), equal_nan=True))]
