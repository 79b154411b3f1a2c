"""The same numbers as the authors' code: a check that anybody can repeat.

    make authors CLONES=folder              runs all scripts of this folder; writes
                                            results/authors.json and results/authors.md
    python checks/authors/everything.py CLONES feddyn    runs one; prints its part of the table

A clone is what `git clone https://github.com/OWNER/NAME` makes, with its history. The files of the
commit that a script names are copied out of it with `git archive`, so that other branches and
changed files play no part, and the clone stays as it is. No line of the authors' code is in this
repository.

A script states in REPOSITORY, COMMITS and CHANGED what it runs, and what is replaced in their
program. Its docstring is its part of the page. Its compare(line, *folders) calls line, which takes
what `row` takes, for each comparison. Ours runs first, as a user runs it (main(argv)), in float64,
on a small data set. What it drew (split, initial weights, sampled clients, minibatches, its own
draws) is written down. Then theirs runs with these.

    1. Clones        source, program
    2. Ours          small_data, ours
    3. Theirs        Given, method_variables, script_variables, put, vector
    4. The table     row, table, compared
"""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import warnings
from collections import defaultdict, deque
from unittest import mock

import numpy as np
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import common
import fl.models
import fl.run
import fl.training

SCRIPTS = ("superfed", "fedslr", "pfedme", "ditto", "feddyn", "lgfedavg", "fedrep", "fedma",
           "torch_sgd")

# --------------------------------------------------------------------------------------------------
# 1. Clones


@contextlib.contextmanager
def source(clones, commit, repository):
    """A temporary folder with the Python files of that commit of a clone."""
    clone = pathlib.Path(clones) / repository.split("/")[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(clone), "archive", commit, "*.py"]
        archive = subprocess.run(command, capture_output=True)
        if archive.returncode:
            reason = archive.stderr.decode().strip().splitlines()[-1]
            how = f"git clone https://github.com/{repository}"
            fl.training.refuse(f"{clone} can't give commit {commit} ({reason}); make it: {how}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield pathlib.Path(folder)


@contextlib.contextmanager
def program(folder, stubs=(), changed=()):
    """In here their modules can be imported, and say nothing. stubs: names of packages that are
    replaced by nothing. changed: pairs of words; in their files (the temporary copies) the second
    takes the first's place."""
    texts = {path: path.read_text(errors="replace") for path in pathlib.Path(folder).rglob("*.py")}
    for path, text in texts.items():
        for old, new in changed:
            text = text.replace(old, new)
        path.write_text(text)
    before, here = dict(sys.modules), os.getcwd()
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    importlib.invalidate_caches()
    # a module of ours with the same name
    for name in [path.stem for path in pathlib.Path(folder).iterdir()]:
        for known in [n for n in sys.modules if n == name or n.startswith(name + ".")]:
            del sys.modules[known]
    for name in stubs:
        spec = importlib.machinery.ModuleSpec(name, None)  # for packages that ask if it is there
        sys.modules[name] = mock.MagicMock(name=name, __path__=[], __spec__=spec)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            double(),
            mock.patch("gc.collect"),  # in every round: slow
        ):
            yield importlib.import_module
    finally:
        for path, text in texts.items():
            path.write_text(text)
        os.chdir(here)
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            where = getattr(module, "__file__", None)
            if name in stubs or (isinstance(where, str) and where.startswith(str(folder))):
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items()
                            if name not in sys.modules})


# --------------------------------------------------------------------------------------------------
# 2. Ours


@contextlib.contextmanager
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def small_data(sizes, side=8, channels=1, classes=3, test=20, seed=0):
    """Arrays of a .npz: noise with a class's brightness in it; client k owns sizes[k] training
    images."""
    rng, n = np.random.default_rng(seed), sum(sizes)
    labels = rng.integers(0, classes, n + test)
    labels[:classes] = np.arange(classes)
    images = rng.integers(0, 200, (n + test, side, side, channels)) + 55 * (
        labels[:, None, None, None] % 2
    )
    return dict(x_train=images[:n].astype(np.uint8), y_train=labels[:n],
                x_test=images[n:].astype(np.uint8), y_test=labels[n:],
                client_train=np.repeat(np.arange(len(sizes)), sizes))


class Small(nn.Module):
    """A convolution and two linear layers, for speed: our model, and what the authors' functions
    get that take any module."""

    start = staticmethod(fl.models.pytorch_default)

    def __init__(self, channels=1, classes=3, size=(8, 8)):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4, 3)
        self.fc1 = nn.Linear(4 * ((size[0] - 2) // 2) ** 2, 8)
        self.fc2 = nn.Linear(8, classes)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Ours:
    """What a run of ours drew and left.

    fed: its Federation. first: the vectors that Net.init returned. S: the sampled clients of every
    round. plans[t, k, order]: the minibatches of client k, the numbers of their images each;
    draws[t, k, order]: [steps, ...]. states: after every round name -> tensor.
    """

    def __init__(self):
        self.fed, self.first, self.S = None, [], []
        self.plans, self.draws, self.states = {}, {}, []

    @property
    def state(self):
        return self.states[-1]

    def model(self, model=None, names=None):
        """Their model (by default Small) with the initial weights."""
        return put(model or Small(), self.first[0], names)

    def batch(self, index):
        """x and y of the images with these numbers, as our own step sees them."""
        index = torch.as_tensor(index)
        return self.fed.transform(self.fed.images[index]), self.fed.labels[index]

    def per_epoch(self, k):
        """Minibatches of client k in an epoch."""
        return -(-len(self.fed.split.train[k]) // self.fed.args.batch_size)

    def steps(self):
        """Of the client who takes most, over all rounds."""
        count = defaultdict(int)
        for (_, k, _), batches in self.plans.items():
            count[k] += len(batches)
        return max(count.values())

    def longest(self):
        """The number of terms of the longest sum in a step: over all weights, or over a minibatch's
        pixels."""
        pixels = int(np.prod(self.fed.data.images.shape[1:]))
        return max(self.fed.net.d, self.fed.args.batch_size * pixels)

    def loader(self, numbers=lambda data: data, orders=(0,), joined=False):
        """Stands in for DataLoader. One that is made for a client's images, whose numbers are
        numbers(data), yields the client's minibatches of its next round. orders: in each round a
        client makes one loader for each; if joined, one for all."""
        owner = {int(i): k for k, own in enumerate(self.fed.split.train) for i in own}
        queues = defaultdict(deque)
        for t, S in enumerate(self.S):
            for k in S:
                parts = [self.plans[t, k, order] for order in orders]
                queues[k] += [sum(parts, [])] if joined else parts

        def load(data, **_):
            k = owner[int(numbers(data)[0])]
            return Given(queues[k].popleft(), self.batch, self.per_epoch(k))

        return load


def ours(module, argv, data, model=Small):
    """An Ours of module.main on these arrays with this model and flags, a text, in float64."""
    seen, federation, run = Ours(), common.Federation, common.Run
    start, plan, sample = federation.__init__, federation.plan, federation.sample
    rounds, init = run.rounds, common.Net.init

    def remember(self, *args, **named):
        start(self, *args, **named)
        seen.fed = self

    def planned(self, k, own, t, epochs, draw=None, order=0):
        numbers, uniform, draws = plan(self, k, own, t, epochs, draw, order)
        draws, B = draws.astype(np.float64), self.args.batch_size or len(own)
        index = [part for epoch in numbers for part in np.split(epoch, range(B, len(own), B))]
        key = t, k, order
        if len(index) > len(seen.plans.get(key, ())):  # a shorter one is its beginning
            seen.plans[key], seen.draws[key] = index, np.concatenate(draws)
        return numbers, uniform, draws

    def sampled(self, t, m=None):
        seen.S.append(sample(self, t, m).tolist())
        return sample(self, t, m)

    def copied(z):
        z = z.all if isinstance(z, fl.run.Rows) else z
        return z.clone() if torch.is_tensor(z) else z

    def watched(self, state, *args, **named):
        for t in rounds(self, state, *args, **named):
            yield t
            seen.states.append({name: copied(z) for name, z in vars(state).items()})

    def first(self, rng):
        seen.first.append(init(self, rng).double())
        return seen.first[-1]

    def exact(data):
        return lambda x, u=None: x.permute(0, 3, 1, 2).double() / 255

    with tempfile.TemporaryDirectory() as folder, double(), contextlib.ExitStack() as stack:
        np.savez(folder + "/data.npz", **data)
        for place, name, new in (
            (federation, "__init__", remember), (federation, "plan", planned),
            (federation, "sample", sampled), (run, "rounds", watched), (common.Net, "init", first),
        ):
            stack.enter_context(mock.patch.object(place, name, new))
        stack.enter_context(mock.patch.dict(common.TRANSFORMS, scale=exact))
        stack.enter_context(mock.patch.dict(common.MODELS, {model.__name__: model}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        flags = "--split natural --transform scale --device cpu --parallel 1 --eval-every 1000"
        module.main(["--dataset", folder + "/data.npz", "--model", model.__name__,
                     "--out", folder + "/run", *flags.split(), *argv.split()])
    return seen


# --------------------------------------------------------------------------------------------------
# 3. Theirs


class Given:
    """In place of a DataLoader: yields the given minibatches, those of one epoch in each iteration.
    get(index) -> x, y. full: the size of minibatches that are not dropped (drop_last)."""

    def __init__(self, batches, get, per_epoch=None, full=None):
        self.get, self.per_epoch = get, per_epoch or len(batches)
        self.left, self.full = deque(batches), full

    def __len__(self):
        return self.per_epoch

    def __iter__(self):
        for _ in range(self.per_epoch):
            index = self.left.popleft()
            if self.full in (None, len(index)):
                yield self.get(index)


def method_variables(load, run, method, data, phases=(0,), **settings):
    """What the variables of a method of FedDyn's and FedSLR's code, which are alike, hold after the
    rounds of our run. Their loaders give our minibatches, their coin flips our clients, and nothing
    is evaluated. A client's images are the array of their numbers, run.fed.split.train[k]."""
    general, methods, args = load("utils_general"), load("utils_methods"), run.fed.args
    rounds, loader = iter(run.S), run.loader(orders=phases)

    def flips(size):  # a client takes part where they are at most act_prob
        return 1.0 - np.isin(np.arange(size), next(rounds))

    with (
        mock.patch.object(general, "data", types.SimpleNamespace(DataLoader=loader)),
        mock.patch.object(general, "Dataset", lambda x, y, **_: x),
        mock.patch.object(np.random, "uniform", flips),
        mock.patch.object(general, "get_acc_loss", lambda *_, **__: (0, 0)),
        mock.patch.object(methods, "get_acc_loss", lambda *_, **__: (0, 0)),
    ):
        return local_variables(
            getattr(methods, method), act_prob=0.5, learning_rate=args.lr, com_amount=len(run.S),
            data_obj=types.SimpleNamespace(n_client=run.fed.K, dataset="check", **data),
            batch_size=args.batch_size, weight_decay=args.weight_decay,
            lr_decay_per_round=args.lr_decay, **settings)


def local_variables(function, *args, **named):
    """What the variables of their function hold when it returns."""
    code, found = getattr(function, "__func__", function).__code__, {}

    def watch(frame, event, value):
        if event == "return" and frame.f_code is code:
            found.update(frame.f_locals)

    sys.setprofile(watch)
    try:
        function(*args, **named)
    finally:
        sys.setprofile(None)
    return types.SimpleNamespace(**found)


def with_layer(run, l):
    """The models of all clients: what they share, state.w [d], with layer l of their own, state.V
    [K, ...]."""
    W = run.state["w"].repeat(len(run.state["V"]), 1)
    W[:, run.fed.net.layers[l][1]] = run.state["V"]
    return W


def script_variables(load, run, path, args, loader, **data):
    """What the variables of a script of LG-FedAvg or FedRep, which are alike, hold after the rounds
    of our run. args: their flags. data: what replaces functions of utils.train_utils."""
    rounds, scope = iter(run.S), {"__name__": "__main__"}

    def choose(*_, **__):  # a StopIteration ends the script when our rounds are done
        return next(rounds)

    with (
        mock.patch.object(load("utils.options"), "args_parser", lambda: args),
        mock.patch.multiple(load("utils.train_utils"), **data),
        mock.patch.object(load("models.Update"), "DataLoader", loader),
        mock.patch.object(np.random, "choice", choose),
        contextlib.suppress(StopIteration),
    ):
        exec(compile(pathlib.Path(path).read_text(), path, "exec"), scope)
    return types.SimpleNamespace(**scope)


def put(module, w, names=None):
    """The weights w [d] into a module's parameters, in their order or that of the names. Returns
    the module."""
    parameters = dict(module.named_parameters())
    parts = [parameters[name] for name in names] if names else list(parameters.values())
    assert sum(p.numel() for p in parts) == len(w), "another number of weights"
    with torch.no_grad():
        for p, part in zip(parts, w.split([p.numel() for p in parts])):
            p.copy_(part.view(p.shape))
    return module


def vector(parts, names=None):
    """A module's parameters, a dictionary's or a list's tensors, as one vector [d]."""
    if isinstance(parts, nn.Module):
        parts = dict(parts.named_parameters())
    if isinstance(parts, dict):
        parts = [parts[name] for name in names or parts]
    return torch.cat([torch.as_tensor(p).detach().double().flatten() for p in parts])


# --------------------------------------------------------------------------------------------------
# 4. The table

EPSILON = 2.0**-52  # of float64


def row(what, theirs, mine, run=None, steps=None, longest=None, rounds=None, because=None,
        enlarged=1.0, stubs=""):
    """A line of the table. theirs, mine: tensors, or lists of them. because: the choice D that
    explains a difference; without one the difference must be rounding. stubs: what was replaced in
    their program.

    The bound. A sum of n numbers is exact to n * epsilon of its largest partial sum; a step is a
    chain of such sums; `steps` of them add up. So bound = epsilon * steps * n * scale, n the
    longest sum, scale the largest number compared and at least 1. That later steps can enlarge an
    error is not counted. enlarged: by what a quotient does (1/eta, for what is divided by eta).
    """
    def flat(x):
        parts = x if isinstance(x, (list, tuple)) else [x]
        return torch.cat([torch.as_tensor(z).detach().double().flatten() for z in parts])

    a, b = flat(theirs), flat(mine)
    assert len(a) == len(b), f"{what}: {len(a)} numbers there, {len(b)} here"
    assert (a - b).isfinite().all(), f"{what}: not finite"
    steps, longest = steps or run.steps(), longest or run.longest()
    bound = EPSILON * steps * longest * max(1.0, float(a.abs().max())) * enlarged
    return dict(what=what, rounds=rounds if rounds else len(run.S) if run else None, steps=steps,
                numbers=len(a), difference=float((a - b).abs().max()), bound=bound,
                because=because, stubs=stubs)


def sound(line):
    """Whether a line is as it should be: rounding, or more than rounding where a D says so."""
    return (line["difference"] <= line["bound"]) == (line["because"] is None)


def table(lines):
    text = [f"{'what':<76}{'rounds':>7}{'steps':>6}{'difference':>12}{'bound':>9}  "]
    for line in lines:
        verdict = line["because"] or "rounding"
        verdict = verdict if sound(line) else f"NOT EXPLAINED ({verdict})"
        sizes = f"{line['difference']:>12.1e}{line['bound']:>9.0e}"
        text.append(f"{line['what']:<76}{line['rounds'] or '':>7}{line['steps']:>6}{sizes}  "
                    f"{verdict}")
    return "\n".join(text)


def script(name):
    """The module of a script in this folder. Not by import: two have the names of ours."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"authors_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(script, clones):
    """The lines of a script's table. clones: the folder with the clones."""
    lines = []

    def line(what, theirs, mine, run=None, stubs=script.CHANGED, **more):
        lines.append(row(what, theirs, mine, run, stubs=stubs, **more))

    torch.manual_seed(0)
    np.random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all is small
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        script.compare(line, *(stack.enter_context(source(clones, commit, script.REPOSITORY))
                               for commit in script.COMMITS))
    return lines
