"""Runs: the loop over the rounds, the record (result.json), the state on disk, resuming,
interruption. And Rows: what clients keep between rounds."""

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from types import SimpleNamespace

import filelock
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from . import plots, training
from .splits import renamed
from .training import is_main_process, refuse, say

# the files, beside the algorithm's, on which a result depends
SHARED = ("common.py", *(f"fl/{name}.py" for name in (
    "data", "flags", "models", "net", "run", "splits", "training", "transforms")))
# what a run may change when it is resumed
FREE = "out", "resume", "plot", "parallel", "engine", "data_dir", "save_clients", "tensorboard"
PLAIN = int, float, bool, str, type(None)  # types that a state and a record can hold
ROW = "round", "seconds", "bytes_up", "bytes_down"  # what the record has of every round
MORE = *ROW, "evaluation_seconds", "top1"  # and what it can have without run.log
SHOWN = {"global": ("top1", "top5", "loss", "ece"),  # what is printed of an evaluated round
         "personal": ("mean", "std", "worst_decile", "val_mean")}

# How often the numbers of an algorithm or method have changed (tests/test_golden.py); 0 if it is
# not named. "all" counts for each of them, and for a file of a user's own.
NUMBERS = {}


def numbers(algorithm):
    """Returns environment["numbers"] of a record of `algorithm` made today."""
    return NUMBERS.get("all", 0) + NUMBERS.get(algorithm, 0)


class Run:
    """The rounds of one run: its loop, its record, its state on disk.

        run = Run(__file__, federation)
        for t in run.rounds(state):             # restores the state if --resume
            S = federation.sample(t)
            state.w = ...                       # tensors are replaced, never changed in place
            state.v[S] = ...                    # rows of federation.per_client may be
            run.sent(up=..., down=...)
            if run.evaluates():                 # stops the round's clock
                run.log(federation.evaluate(state.w), federation.evaluate_clients(...))

    state: any object whose attributes are what survives a round: tensors, Rows, numbers, strings,
    None. `rounds` ends the program when the run diverges (exit code 3) or is interrupted (130 for
    Ctrl-C); record and state are then on disk. Do not leave the loop by `break`: its round would be
    lost.
    """

    def __init__(self, file, federation, fixed_rounds=""):
        """fixed_rounds: why --resume can't change --rounds, where an algorithm depends on them."""
        self.algorithm = pathlib.Path(file).stem
        self.federation, self.args, self.fixed_rounds = federation, federation.args, fixed_rounds
        args, data, rank = federation.args, federation.data, federation.rank
        self.out = pathlib.Path(args.out or f"runs/{self.algorithm}-{data.name}-{args.seed}")
        self.record_file = self.out / "result.json"
        self.state_file = self.out / (f"state-{rank}.pt" if rank else "state.pt")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if is_main_process():
                tempfile.TemporaryFile(dir=self.out).close()
        except OSError as problem:
            refuse(f"--out {self.out} can't be written to: {problem.strerror}")
        here, sources = pathlib.Path(__file__).resolve().parent.parent, {}
        own = [name.rpartition(":")[0] for name in (args.model, args.split) if ".py:" in name]
        folders = {pathlib.Path(name).resolve().parent for name in (*own, file)} - {here}
        own += [args.init] if args.init else []
        for path in map(pathlib.Path, (file, *(here / name for name in SHARED), *own)):
            key = f"fl/{path.name}" if path.parent == here / "fl" else path.name
            if sources.setdefault(key, path).resolve() != path.resolve():
                refuse(f"two files of this run are called {path.name}: the record names files by "
                       "their names; rename yours")
        for folder in folders:  # what the files import from there
            for name, path in imported(folder).items():
                sources.setdefault(name, path)
        replaced = [path.resolve() for path in self.replaced()]
        if args.init and pathlib.Path(args.init).resolve() in replaced:
            refuse(f"--init {args.init} is a file that this run replaces; use another --out")
        self.identity = {  # what a state must share with the run that resumes it
            "args": {**{name: str(z) if isinstance(z, os.PathLike) else z
                        for name, z in vars(args).items()}, "device": str(federation.device)},
            "data": data.fingerprint(), "split": federation.whole_split.fingerprint(),
        }
        path, argv = pathlib.Path(file).resolve(), getattr(args, "argv", None)
        path = path.relative_to(here) if here in path.parents else path
        self.command = None if argv is None else shlex.join(
            [str(path), *(word for word in argv if word != "--resume")])
        self.environment = {
            "python": platform.python_version(), "torch": str(torch.__version__),
            "numpy": np.__version__, "cuda": torch.version.cuda,
            "device": training.device_name(federation.device), "processes": federation.processes,
            "commit": commit(sources.values()),
            "sources": {name: hashlib.sha256(path.read_bytes()).hexdigest()
                        for name, path in sources.items()},
        }
        self.history, self.failed = [], []  # the rows of complete rounds, and of one that diverged
        self.per_client = None  # accuracies at the last evaluation
        self.status, self.handlers = "unfinished", {}
        self.complete = False  # True: the record on disk is finished, and this call adds no rounds
        self.targets, self.last = getattr(args, "target", None), args.rounds  # target: accuracies
        self.begun, self.seconds_writing = time.monotonic(), 0.0
        self.marks, self.board = {}, None  # round -> curves.png's label; SummaryWriter
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            refuse("--tensorboard needs the package tensorboard: pip install tensorboard")

    # The loop

    def rounds(self, state, model="w", clients=None):
        """Yields t = 0 .. T-1. After each it completes the round: its row of the record, its state.

        model: the global model [d], which becomes model.pt in the end: a name in `state`, a
        function of `state`, or None where there is none. clients: the clients' own models [K, d],
        for --save-clients: a name in `state`, or a function of rows S: [m, d].
        """
        self.state, self.model, self.models = state, model, clients
        with self.open():  # after --resume `state` is as it was saved
            while len(self.history) < self.last:
                self.row = dict(zip(ROW, (len(self.history) + 1, 0, 0, 0)))
                self.clock = training.now(self.federation.device)
                yield len(self.history)
                self.end_round()
            self.finish("finished")

    def end_round(self):
        """Completes the row; writes the state after an evaluated round. May end the run."""
        row, federation = self.row, self.federation
        row["seconds"] = row["seconds"] or self.elapsed()
        losses = [row[part]["loss"] for part in SHOWN if part in row]
        finite = all(map(is_finite, [*losses, *vars(self.state).values()]))
        mine = torch.tensor([not finite, row["bytes_up"], row["bytes_down"]], dtype=torch.double)
        total = federation.all_reduce(mine.to(federation.device)).tolist()
        diverged, row["bytes_up"], row["bytes_down"] = map(int, total)
        if diverged:
            self.diverge()
        self.keep()
        self.per_client = row.pop("per_client", self.per_client)
        self.history.append(row)
        self.bar.update()
        if row.keys() - MORE and row["round"] < self.last:
            self.save()
        if federation.stop:
            raise SystemExit(federation.stop)

    def keep(self):
        """Keeps the present state for an interruption or divergence."""
        for rows in self.federation.all_rows:
            rows.replaced.clear()
        self.kept = dict(vars(self.state))
        self.versions = {name: z._version for name, z in self.kept.items() if torch.is_tensor(z)}

    def elapsed(self):
        """Returns the seconds since the round began, or since its clock stopped."""
        return round(training.now(self.federation.device) - self.clock - self.row["seconds"], 4)

    def sent(self, up, down):
        """Counts 4 bytes for each number sent: `up` to the server, `down` to clients."""
        self.row["bytes_up"] += 4 * up
        self.row["bytes_down"] += 4 * down

    def evaluates(self, w=None):
        """Stops the round's clock. Returns whether this round is evaluated: every --eval-every
        rounds, and the last. A round in which w [d] reaches every --target becomes the last."""
        row = self.row
        row["seconds"] = row["seconds"] or self.elapsed()
        if self.targets:
            self.measure(w)
        return row["round"] % self.args.eval_every == 0 or row["round"] == self.last

    def measure(self, w):
        """Measures the accuracy of w [d]. If it has reached --target, this round is the last."""
        fed, top1 = self.federation, self.federation.evaluate(w)["top1"]
        top1 = torch.tensor([top1], dtype=torch.double, device=fed.device)
        self.row["top1"] = fed.mean(top1).item()  # one number for all processes
        self.row["evaluation_seconds"] = self.elapsed()
        if self.row["top1"] >= max(self.targets):
            self.last = self.row["round"]

    def log(self, global_=None, personal=None, **more):
        """Records this round's measures: evaluate's, evaluate_clients', and others (tensors, Rows,
        numbers, texts). Prints the first two, and of others single numbers."""
        self.check_kept()
        row = self.row
        more = tree_map(lambda z: self.federation.gather(z.all) if isinstance(z, Rows) else z, more)
        more = tree_map(lambda z: z.tolist() if hasattr(z, "tolist") else z, more)
        if strange := [type(z).__name__ for z in tree_leaves(more) if type(z) not in PLAIN]:
            refuse(f"run.log can't record a {strange[0]}; give it tensors, numbers and texts")
        row["seconds"] = row["seconds"] or self.elapsed()
        if global_:
            row["global"] = global_
        if personal:
            row["personal"], row["per_client"] = without_clients(personal), personal["per_client"]
        row.update(more)
        row["evaluation_seconds"] = self.elapsed()
        words = [f"round {row['round']:>{len(str(self.args.rounds))}}"]
        words += [in_words(part, row[part], SHOWN[part]) for part in SHOWN if part in row]
        words += [f"{name} {z:.4g}" for name, z in more.items() if isinstance(z, float)]
        say("  |  ".join([*words, f"{row['seconds']:.2f} s"]))
        if self.board:
            for part in SHOWN:
                for name, value in row.get(part, {}).items():
                    self.board.add_scalar(f"{part}/{name}", value, row["round"])
            self.board.flush()

    def check_kept(self):
        """Refuses a state that --resume can't restore."""
        if late := self.kept.keys() - self.names:
            refuse(f"the loop adds {', '.join(late)} to `state`; set every name before "
                   "run.rounds(state)")
        for name, z in self.kept.items():
            if torch.is_tensor(z):
                if z._version != self.versions[name]:
                    refuse(f"state.{name} was changed in place, here or in client_update; write "
                           "w = w + ..., not w += ... or w[i] = ..., and begin anew")
            elif type(z) not in (Rows, *PLAIN):
                refuse(f"state.{name} is a {type(z).__name__}; keep tensors and Python's own "
                       "numbers")  # others could change unseen, or would not be loaded

    # The end of a run

    def diverge(self):
        say(f"round {self.row['round']}: diverged, a weight or a loss is not finite; the state "
            "before it is kept")
        self.failed = [{**{name: self.row[name] for name in ROW}, "diverged": True}]
        self.finish("diverged")
        raise SystemExit(3)

    def interrupt(self, number, frame):
        """Has Ctrl-C and SIGTERM end the program at a minibatch, or when the round is complete."""
        self.federation.stop = 128 + number  # the exit code

    def finish(self, status):
        """Writes the record and the models, prints the results, and draws --plot's figures."""
        fed, self.status = self.federation, status
        for rows in fed.all_rows:
            rows.undo()  # what a round that was not completed has changed
        self.bar.close()
        problem = self.save(end=True)
        if status != "diverged":
            lost = self.save_models()
            problem = problem or lost * (not self.state_file.exists())  # nor is the model there
        record = self.record()
        self.show(record)
        fed.graphs.clear()
        if fed.processes > 1 and status != "interrupted":  # after an interruption NCCL might wait
            atexit.register(dist.destroy_process_group)
        if problem:
            again = ("; the same command with --resume goes on from the last state that was written"
                     if self.state_file.exists() else ", and run it again")
            refuse(f"{problem}; mend that{again}", alone=True)
        go_on = "; to go on: the same command with --resume" * (status == "interrupted")
        say(f"record  {self.record_file}{go_on}")
        if self.args.plot and status == "finished" and is_main_process():
            setting = plots.setting(record)
            plots.plot(record, setting, fed.data, fed.whole_split, self.out, self.marks)

    def show(self, record):
        """Prints the table of a record."""
        minutes = [sum(row.get(name, 0) for row in record["rounds"]) / 60
                   for name in ("seconds", "evaluation_seconds")]
        say(f"\n{self.algorithm} on {self.federation.data.name}, {record['status']} after "
            f"{len(record['rounds'])} of {self.args.rounds} rounds: {minutes[0]:.1f} min of "
            f"training, {minutes[1]:.1f} of evaluation, {record['bytes_up'] / 1e6:.1f} MB up, "
            f"{record['bytes_down'] / 1e6:.1f} MB down")
        for part in record["best"]:
            for when in ("final", "best"):
                measures = record[when][part]
                say(f"{when:<5}  round {measures['round']}  {in_words(part, measures)}")
        if record["status"] == "finished" and not record["final"]:
            say("note    no round has called run.log, so the record has no accuracies")
        for target, t in record.get("rounds_to", {}).items():
            say(f"target  {target}: " + (f"after {t:.1f} rounds" if t else "not reached"))

    # The record and the state

    def save(self, end=False):
        """Writes the record and the state. Before the end of the run it skips the state if writing
        states has taken more than a second plus a twentieth of the run's time. Several processes
        that are interrupted may be in different rounds, and write no state. Returns what went
        wrong, if that ends the run with an error."""
        start, problem = time.monotonic(), ""
        if self.complete:
            return problem
        late = not end and self.anywhere(self.seconds_writing > 1 + (start - self.begun) / 20)
        if not late and (self.federation.processes == 1 or self.status != "interrupted"):
            self.check_kept()
            problem = self.write(self.state_file, self.put_state, together=True)
        self.seconds_writing += time.monotonic() - start
        if is_main_process():
            text = json.dumps(without_nan(self.record()), indent=1) + "\n"
            wrong = self.write(self.record_file, lambda file: file.write(text.encode()))
            problem = wrong or problem * (self.status != "finished")
        return problem

    def anywhere(self, what):
        """Whether `what` is true in any process."""
        flag = torch.tensor(float(bool(what)), device=self.federation.device)
        return bool(self.federation.all_reduce(flag))

    def write(self, path, put, together=False):
        """Has put(file) write a file, which then takes the place of `path`: whole or, if the disk
        is full, not at all. together: in all processes, or in none. Returns and says what
        went wrong."""
        part, why = path.with_name(path.name + ".part"), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with open(part, "wb") as file:
                put(file)
        except (OSError, RuntimeError) as problem:  # torch.save raises RuntimeError instead
            causes = problem, problem.__context__
            why = next((z.strerror for z in causes if isinstance(z, OSError)), str(problem))
        if together and self.anywhere(why):
            why = why or "another process could not write its own"
        try:
            part.unlink() if why else os.replace(part, path)
        except OSError as problem:  # on Windows: somebody reads it
            why = why or problem.strerror
        problem = f"{path} can't be written: {why}" if why else ""
        if problem:
            say(f"disk    {problem}")
        return problem

    def put_state(self, file):
        state = {name: z.all if isinstance(z, Rows) else z for name, z in self.kept.items()}
        state = {name: z.cpu() if torch.is_tensor(z) else z for name, z in state.items()}
        torch.save({"state": state, "history": self.history, "per_client": self.per_client,
                    "environment": self.environment, **self.identity}, file)

    def save_models(self):
        """Writes state dicts: model.pt (global) and, with --save-clients, clients.pt. Returns what
        went wrong."""
        fed, kept, models, problem = self.federation, self.kept, {}, ""
        if self.model:
            given = callable(self.model)
            models["model.pt"] = self.model(SimpleNamespace(**kept)) if given else kept[self.model]
        if self.args.save_clients and not self.models:
            say(f"note    {self.algorithm} keeps no clients' models, so there is no clients.pt")
        if self.args.save_clients and self.models and self.status == "finished":
            of = self.models if callable(self.models) else kept[self.models].__getitem__
            # in the host's memory, since the device may lack the room
            own = torch.cat([of([row]).cpu() for row in fed.rows()])
            models["clients.pt"] = fed.gather(own)
        for name, w in models.items() if is_main_process() else ():
            put = functools.partial(torch.save, fed.net.state_dict(w))
            problem = self.write(self.out / name, put) or problem
        return problem

    def record(self):
        """result.json's content; docs/run.md says what each field means."""
        federation, net, history = self.federation, self.federation.net, self.history
        split, data, final, best = federation.whole_split, federation.data, {}, {}
        for part, key in (("global", "top1"), ("personal", "mean")):
            if seen := [{**row[part], "round": row["round"]} for row in history if part in row]:
                final[part], best[part] = dict(seen[-1]), max(seen, key=lambda row: row[key])
        if "personal" in final:
            final["personal"]["per_client"] = self.per_client
        last = next((row for row in reversed(history) if row.keys() - MORE), {})
        final |= {name: last[name] for name in last if name not in (*MORE, *SHOWN)}
        history = [*history, *self.failed]
        seconds = [row["seconds"] for row in history]
        self.environment["numbers"] = numbers(self.algorithm)  # baselines.py names its method late
        peak = None
        if federation.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(federation.device) / 2**20
            self.environment["way"] = federation.used
        elif importlib.util.find_spec("resource"):  # not on Windows
            import resource
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = peak / 2**(20 if sys.platform == "darwin" else 10)
        if federation.failed:
            self.environment["slower"] = federation.failed
        reached = {f"{target:g}": rounds_to(target, history) for target in self.targets or ()}
        return {
            "algorithm": self.algorithm, "command": self.command, "status": self.status,
            "diverged": self.status == "diverged", "args": self.identity["args"],
            "environment": self.environment,
            "data": {"name": data.name, "fingerprint": self.identity["data"],
                     **({"classes": data.names} if data.names else {})},
            "split": {"fingerprint": self.identity["split"], "clients": len(split.train),
                      "sizes": [len(index) for index in split.train],
                      "classes": split.classes(data.labels)},
            "parameters": net.d, **({"batchnorm_layers": net.batchnorms} if net.batchnorms else {}),
            "rounds": history, "final": final, "best": best,
            **({"rounds_to": reached} if reached else {}),
            **{name: sum(row[name] for row in history) for name in ("bytes_up", "bytes_down")},
            "seconds_per_round": float(np.median(seconds)) if seconds else None,
            "peak_memory_mb": peak and round(peak, 1),
        }

    # The folder of a run: its lock, resuming, and what lies there from an earlier one

    @contextlib.contextmanager
    def open(self):
        """Begins or resumes the run. Refuses what it must before anything is printed."""
        self.names, first = set(vars(self.state)), is_main_process()
        lock = filelock.FileLock(self.out / ".lock")
        try:
            if first:
                lock.acquire(blocking=False)
        except filelock.Timeout:
            refuse(f"another run is writing to {self.out}; use another --out", alone=True)
        except (OSError, NotImplementedError):
            pass  # a file system without locks
        try:
            resumed = self.args.resume and self.resume()
            self.federation.describe()
            if first and not resumed:
                self.put_aside()
            self.keep()
            if self.args.tensorboard and first:
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(self.out, purge_step=len(self.history) + 1)
            self.bar = tqdm(total=self.args.rounds, initial=len(self.history), unit="round",
                            desc=self.algorithm, leave=False, dynamic_ncols=True,
                            disable=None if first else True)
            if threading.current_thread() is threading.main_thread():
                self.handlers = {number: signal.signal(number, self.interrupt)
                                 for number in (signal.SIGINT, signal.SIGTERM)}
            yield
        finally:  # also where the loop's body raises, since that closes the generator `rounds`
            if self.federation.stop and self.status == "unfinished":
                with contextlib.suppress(SystemExit):
                    self.finish("interrupted")
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            if lock.is_locked:
                with contextlib.suppress(OSError):  # Windows removes no open file
                    os.remove(lock.lock_file)
                lock.release()

    def resume(self):
        """Restores a state on the disk. Returns whether there is one. Refuses another run's."""
        path, federation, found = self.state_file, self.federation, self.state_file.exists()
        try:
            finished = json.loads(self.record_file.read_text())["status"] == "finished"
        except (OSError, ValueError, KeyError, TypeError):  # no record, or a broken one
            finished = False
        if found:
            self.restore(self.read_state(path))
        elif finished:
            refuse(f"{self.record_file} is finished, and there is no {path.name} to resume; to run "
                   "it again, leave out --resume")
        else:
            federation.notes.append(f"resume  nothing to resume in {self.out}; starting at round 1")
        done = torch.tensor([float(len(self.history))], device=federation.device)
        if self.anywhere(federation.mean(done) != done):
            refuse(f"{path} has another number of rounds than other processes; start anew")
        self.complete = done == self.last and self.anywhere(finished)
        if is_main_process() and found and not self.complete:
            for name in ("model.pt", "clients.pt"):  # of an earlier round
                (self.out / name).unlink(missing_ok=True)
        return found

    def read_state(self, path):
        for z in vars(self.state).values():
            if isinstance(z, Rows):
                z.all = None  # makes room for what is read
        try:
            if zipfile.ZipFile(path).testzip():
                raise ValueError
            saved = torch.load(path, map_location="cpu", weights_only=True)
            then, done = facts(saved), len(saved["history"])
        except Exception as problem:  # torch.load raises nearly anything on a broken file
            refuse(f"{path} can't be read ({type(problem).__name__}); use another --out, or remove "
                   "it", alone=True)
        now = facts({**self.identity, "environment": self.environment})
        for name in {**then, **now}:
            a, b = then.get(name), now.get(name)
            why = f"belongs to {name} {a}, this run has {b}"
            if name in self.environment["sources"]:
                why = f"was made by another version of {name}"
            if name == "--rounds":
                a = b if done < b and not self.fixed_rounds else a  # more are welcome
                why += f": {self.fixed_rounds or f'{done} are done'}"
            if a != b:
                refuse(f"{path} {why}; use the same or another --out")
        return saved

    def restore(self, saved):
        for name, z in saved["state"].items():
            if isinstance(rows := getattr(self.state, name), Rows):
                rows.all = z if rows.far else z.to(rows.device)
            else:
                z = z.to(self.federation.device) if torch.is_tensor(z) else z
                setattr(self.state, name, z)
        self.history, self.per_client = saved["history"], saved["per_client"]
        done, past, now = len(self.history), saved["environment"], self.environment
        if self.targets and done and self.history[-1]["top1"] >= max(self.targets):
            self.last = done
        self.federation.notes.append(
            f"resume  {self.state_file}: {done} of {self.args.rounds} rounds are done"
            + f", by torch {past['torch']}" * (past["torch"] != now["torch"]))
        if done < self.last and any(past.get(name) != now[name] for name in now):
            past = {**past, "resumed": [*past.get("resumed", []), now]}
        self.environment = past

    def replaced(self):
        """Returns the files of an earlier run in the folder, which a new run would replace."""
        names = ("result.json", "state.pt", "state-*[0-9].pt", "model.pt", "clients.pt",
                 "events.out.tfevents.*[0-9]")
        aside = set(self.out.glob("*.previous.*"))
        return [path for name in names for path in sorted({*self.out.glob(name)} - aside)]

    def put_aside(self):
        """Renames the files that an earlier run left in the folder."""
        for path in self.replaced():
            previous = path.with_suffix(".previous" + path.suffix)
            os.replace(path, previous)
            say(f"kept    the earlier {path.name} in {self.out} as {previous.name}")


def in_words(part, measures, names=None):
    """Returns the measures called `names`, or all of them, as text."""
    shown = {name: z for name, z in measures.items() if isinstance(z, float)}
    return part + "".join(f" {name} {shown[name]:.4f}" for name in names or shown if name in shown)


def facts(saved):
    """Returns {name: value} of what a state and the run that resumes it must share."""
    flags = {"--" + name.strip("_").replace("_", "-"): value
             for name, value in renamed(saved["args"]).items() if name not in FREE}
    made, sources = saved["environment"], saved["environment"]["sources"]
    return {"file": next(iter(sources)), "processes": made["processes"], **flags, **sources,
            "data": saved["data"], "split": saved["split"]}


def rounds_to(target, history):
    """Returns after how many rounds the best accuracy so far reaches the target, interpolated
    linearly, or None."""
    measured = [row for row in history if "top1" in row]
    t = [row["round"] for row in measured]
    best = np.maximum.accumulate([row["top1"] for row in measured])
    i = int(np.searchsorted(best, target))  # the first that is at least the target
    near = slice(max(i - 1, 0), i + 1)
    return float(np.interp(target, best[near], t[near])) if i < len(t) else None


def imported(folder):
    """Returns {name: path} of the modules that were imported from a folder."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        for path in (name.replace(".", "/") + end for end in (".py", "/__init__.py")):
            if getattr(module, "__file__", None) == str(folder / path):
                found[path] = folder / path
    return found


def without_clients(measures):
    """Returns evaluate_clients' measures without the clients' accuracies."""
    return {name: value for name, value in measures.items() if name != "per_client"}


def without_nan(tree):
    """NaN and infinity become None."""
    return tree_map(lambda z: None if isinstance(z, float) and not np.isfinite(z) else z, tree)


def commit(sources):
    """Returns the git commit of this checkout, with + if one of the files `sources` differs
    from it; None without one."""
    here = pathlib.Path(__file__).resolve().parent.parent

    def git(*words):
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True)

    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # no git
        return None
    sources = [pathlib.Path(path).resolve() for path in sources]
    found = git("status", "--porcelain", "--ignored", "--", *sources)
    changed = found.stdout or found.returncode  # git fails on a file elsewhere
    return None if head.returncode else head.stdout.strip() + "+" * bool(changed)


# --------------------------------------------------------------------------------------------------
# What clients keep


class Rows:
    """What the clients of this process keep between rounds, a row each. rows[S] copies the rows of
    the clients S (or of one) to the device; rows[S] = x replaces them.

    all: the whole tensor [rows, ...]. It is made on the device if all Rows together take at most a
    quarter of its free memory, else in the host's memory. Until a round is complete, the rows that
    it replaced are remembered: `undo` puts them back.
    """

    def __init__(self, fed, first):
        """first(k): the row of client number k."""
        like, n = first(int(fed.clients[0])), len(fed.clients)
        size = like.nbytes * n
        near = sum(rows.all.nbytes for rows in fed.all_rows if not rows.far)
        self.far = 4 * (near + size) > free_memory(fed.device) + near
        self.device, self.replaced = fed.device, []
        try:
            self.all = torch.empty((n, *like.shape), dtype=like.dtype,
                                   device="cpu" if self.far else fed.device)
        except RuntimeError as problem:
            refuse(f"{n} clients keep {size / 1e9:.1f} GB ({training.first_line(problem)}); use "
                   "fewer --clients or a smaller --model", alone=True)
        for i, k in enumerate(fed.clients):
            self.all[i] = first(int(k))
        fed.all_rows.append(self)

    def __getitem__(self, S):
        shape, index = self.index(S)
        return self.all.index_select(0, index).view(shape).to(self.device)

    def __setitem__(self, S, x):
        if isinstance(x, Sampled):
            raise TypeError("rows[S] = other.of(T) would copy nothing; write rows[S] = other[T]")
        shape, index = self.index(S)
        x = x.expand(shape)  # one row for all of S, or a row each
        self.replaced.append((index, self.all.index_select(0, index), is_finite(x)))
        x = x.to(self.all.device, self.all.dtype).view(len(index), *self.all.shape[1:])
        self.all.index_copy_(0, index, x)

    def index(self, S):
        """The shape of rows[S], and these rows' indices. S: as NumPy takes it, or a tensor."""
        S = np.arange(len(self.all))[S if np.size(S) else []]
        index = torch.from_numpy(np.atleast_1d(S)).to(self.all.device)
        return (*S.shape, *self.all.shape[1:]), index

    def of(self, S):
        """self[S] for Federation.train, which fetches a row when its client's turn comes."""
        return Sampled(self, S)

    def sum(self, dim=0):
        """Returns the sum over this process's clients [...]. dim: 0, from Federation.sum."""
        return self.all.sum(0).to(self.device)

    def undo(self):
        while self.replaced:
            index, rows, _ = self.replaced.pop()
            self.all.index_copy_(0, index, rows)


class Sampled:
    """Rows of the clients S, [m, ...], of which only those that are asked for become tensors."""

    def __init__(self, rows, S):
        self.rows, self.S = rows, S

    def __getitem__(self, i):
        return self.rows[self.S[i]]


def free_memory(device):
    """Bytes of a GPU that nothing holds; what PyTorch keeps for the next tensor is free, too."""
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def is_finite(z):
    """Returns whether a tensor, or all that a round has put into Rows, is finite. x.isfinite()
    would make tensors as large as x."""
    if isinstance(z, Rows):
        return all(sound for *_, sound in z.replaced)
    z = torch.as_tensor(z if isinstance(z, float | torch.Tensor) else 0)
    return not z.numel() or bool(torch.stack(torch.aminmax(z)).isfinite().all())
