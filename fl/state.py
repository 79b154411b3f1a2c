"""What survives a round: Rows, which clients keep, and the state on disk, from which --resume goes
on."""

import json
import zipfile

import numpy as np
import torch

from .machine import first_line, free_memory, refuse
from .records import FREE

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
        if not torch.is_tensor(like):
            refuse(f"federation.per_client takes a tensor, or a function of k that gives one, not "
                   f"a {type(like).__name__}; write torch.tensor(x)")
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


def tensors_of(state):
    """Returns {name: tensor, or number} of a state, of Rows the whole tensor."""
    return {name: z.all if isinstance(z, Rows) else z for name, z in vars(state).items()}


def marks(named):
    """Returns what tells `changed` later which tensors, or numbers, of {name: z} have changed."""
    return {name: (z, version(z)) for name, z in named.items()}


def changed(before, named):
    """Returns the names of what has changed since `before`, which marks has returned."""
    return [name for name, (z, then) in before.items()
            if version(now := named[name]) != then or now is not z and (
                torch.is_tensor(z) or now != z)]


def version(z):
    """Returns how often a tensor was changed in place."""
    return z._version if torch.is_tensor(z) and not z.is_inference() else 0


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
