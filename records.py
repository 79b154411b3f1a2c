"""Runs: the loop over the rounds, the record (result.json), the state on disk, resuming,
interruption. And Rows: what clients keep between rounds."""

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from types import SimpleNamespace
from typing import NamedTuple

import filelock
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from tqdm import tqdm

import engine
from engine import is_main_process, refuse, say
from splits import renamed

try:
    import resource
except ImportError:  # on Windows
    resource = None

# the files, beside the algorithm's, on which a result depends
SHARED = "common.py", "models.py", "splits.py", "datasets.py", "engine.py", "records.py"
# what a run may change when it is resumed
FREE = "out", "resume", "plot", "parallel", "engine", "data_dir", "save_clients", "tensorboard"


# How often the numbers of an algorithm or method have changed (tests/test_golden.py);
# 0 if it is not named. "all" counts for each of them, and for a file of a user's own.
NUMBERS = {}


def numbers(algorithm):
    """Returns what a record of `algorithm` made today has as environment["numbers"]."""
    return NUMBERS.get("all", 0) + NUMBERS.get(algorithm, 0)


class Kept(NamedTuple):
    """What the last complete round left."""

    state: dict
    history: list  # the rows of all rounds
    per_client: list  # accuracies at the last evaluation; None before it


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
        self.federation, self.args = federation, federation.args
        args, data = self.args, federation.data
        self.out = pathlib.Path(args.out or f"runs/{self.algorithm}-{data.name}-{args.seed}")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if is_main_process():
                tempfile.TemporaryFile(dir=self.out).close()
        except OSError as problem:
            refuse(f"--out {self.out} can't be written to: {problem.strerror}")
        rank, processes = federation.rank, federation.processes
        self.record_file = self.out / "result.json"
        self.state_file = self.out / ("state.pt" if processes == 1
                                      else f"state-{rank}-of-{processes}.pt")
        here = pathlib.Path(__file__).parent
        own = [name.rpartition(":")[0] for name in (args.model, args.split) if ".py:" in name]
        own += [args.init] if args.init else []
        sources = [pathlib.Path(path) for path in (file, *(here / name for name in SHARED), *own)]
        for path in sources:
            if any(path.name == other.name and path.resolve() != other.resolve()
                   for other in sources):
                refuse(f"two files of this run are called {path.name}: the record names files by "
                       "their names; rename yours")
        known = {name: str(z) if isinstance(z, os.PathLike) else z
                 for name, z in vars(args).items()}
        self.identity = {  # what a state must share with the run that resumes it
            "args": {**known, "device": str(federation.device)},
            "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                        for path in sources},
            "data": data.fingerprint(), "split": federation.whole_split.fingerprint(),
        }
        self.environment = {
            "python": platform.python_version(), "torch": str(torch.__version__),
            "numpy": np.__version__, "cuda": torch.version.cuda,
            "device": engine.device_name(federation.device), "processes": processes,
            "commit": commit(sources), "sources": self.identity["sources"],
        }
        self.status, self.handlers, self.saving, self.pending = "unfinished", {}, False, None
        self.complete = False  # True: the record on disk is finished, and this call adds no rounds
        self.targets = getattr(args, "target", None)  # accuracies
        self.begun, self.seconds_writing = time.monotonic(), 0.0
        self.unwritten = {}  # what went wrong in writing, by file
        self.fixed_rounds = fixed_rounds
        self.marks = {}  # for curves.png: a round -> what begins with it
        self.writer, self.board = summary_writer() if args.tensorboard else None, None

    # The loop

    def rounds(self, state, model="w", clients=None):
        """Yields t = 0 .. T-1. After each it completes the round: its row of the record, its state,
        the files.

        model: the global model [d], which becomes model.pt in the end: a name in `state`, a
        function of `state`, or None where there is none. clients: the clients' own models, for
        --save-clients: a name in `state`, [K, d], or a function: the rows S -> [m, d].
        """
        self.model, self.models = model, clients
        with self.open(state):  # after --resume `state` is as it was saved
            while len(self.kept.history) < self.last:
                self.begin_round()
                yield len(self.kept.history)
                self.end_round()
            self.finish("finished")

    @contextlib.contextmanager
    def open(self, state):
        """Begins, or goes on after --resume. All that can be refused is, before anything is
        printed."""
        self.state, self.names = state, set(vars(state))
        with locked(self.out, self.federation):
            status = self.status_on_disk() if self.args.resume else None
            saved = self.saved(status) if self.args.resume else None
            self.federation.describe()
            history, per_client = self.restore(saved) if saved else ([], None)
            if not saved:
                self.put_aside()
            if self.writer and is_main_process():
                self.board = self.writer(self.out, purge_step=len(history) + 1)
            self.keep(history, per_client)
            target = self.on_target(history)
            self.complete = status == "finished" and (len(history) == self.args.rounds or target)
            if saved and not self.complete and is_main_process():
                for name in ("model.pt", "clients.pt"):  # of an earlier round
                    (self.out / name).unlink(missing_ok=True)
            self.last = len(history) if target else self.args.rounds
            self.bar = tqdm(total=self.args.rounds, initial=len(history), desc=self.algorithm,
                            unit="round", leave=False, dynamic_ncols=True,
                            disable=None if is_main_process() else True)
            if threading.current_thread() is threading.main_thread():
                self.handlers = {number: signal.signal(number, self.interrupt)
                                 for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in self.handlers.items():
                    signal.signal(number, handler)

    def begin_round(self):
        self.row = {"round": len(self.kept.history) + 1, "seconds": None,
                    "bytes_up": 0, "bytes_down": 0}
        self.per_client = self.kept.per_client
        self.clock = engine.now(self.federation.device)

    def end_round(self):
        """Completes the round's row, keeps what the round left, and writes it if the round was
        evaluated. May end the program."""
        self.stop_clock()
        sent = [self.row["bytes_up"], self.row["bytes_down"]]
        sent = self.federation.all_reduce(torch.tensor(sent, device=self.federation.device))
        self.row["bytes_up"], self.row["bytes_down"] = sent.tolist()
        if not self.is_finite():
            self.diverge()
        self.keep([*self.kept.history, self.row], self.per_client)
        self.bar.update()
        evaluated = self.row.keys() & {"global", "personal"}
        if self.pending or (evaluated and self.row["round"] < self.last):
            self.save()

    def keep(self, history, per_client):
        """The round is complete: an interruption from here on writes this state."""
        self.saving = True  # so that an interruption waits
        for rows in self.federation.all_rows:
            rows.accept()
        self.versions = {name: z._version for name, z in vars(self.state).items()
                         if torch.is_tensor(z)}
        self.kept, self.saving = Kept(dict(vars(self.state)), history, per_client), False

    def check_kept(self):
        """Refuses a method that --resume would not serve: that changes a tensor of its state in
        place, or adds to the state."""
        if late := vars(self.state).keys() - self.names:
            refuse(f"the loop adds {', '.join(late)} to `state`; set every name before "
                   "run.rounds(state)")
        for name, z in vars(self.state).items():
            # a change in place of other things would not be seen, or torch.load would not read them
            known = Rows, int, float, bool, str, type(None)
            if not torch.is_tensor(z) and type(z) not in known:
                refuse(f"state.{name} is a {type(z).__name__}; keep tensors and Python's own "
                       "numbers")
        for name, version in self.versions.items():
            if self.kept.state[name]._version != version:
                refuse(f"state.{name} was changed in place; write state.{name} = state.{name} + "
                       "... instead of +=, and begin anew")

    def stop_clock(self):
        if not self.row["seconds"]:
            self.row["seconds"] = round(engine.now(self.federation.device) - self.clock, 4)

    def sent(self, up, down):
        """Counts what this round sent: numbers from clients to the server and back, 4 bytes
        each."""
        self.row["bytes_up"] += 4 * up
        self.row["bytes_down"] += 4 * down

    def evaluates(self, w=None):
        """Stops the round's clock. Says whether this round is evaluated: each --eval-every rounds,
        and the last one. w [d]: the global model. With --target it is measured here; when it has
        reached all targets, this round is the last."""
        self.stop_clock()
        self.last = self.measure(w) if self.targets else self.args.rounds
        number = self.row["round"]
        return number % self.args.eval_every == 0 or number == self.last

    def measure(self, w):
        """Measures the accuracy of w [d]. Returns the last round: this one, if all of --target are
        reached."""
        device, top1 = self.federation.device, self.federation.evaluate(w)["top1"]
        top1 = torch.tensor([top1], dtype=torch.double, device=device)
        self.row["top1"] = self.federation.mean(top1).item()  # one number for all processes
        self.row["evaluation_seconds"] = self.evaluation_seconds()
        return self.row["round"] if self.on_target([self.row]) else self.args.rounds

    def on_target(self, history):
        """Whether the accuracy has reached all of --target."""
        return bool(self.targets) and any(row.get("top1", 0) >= max(self.targets)
                                          for row in history)

    def evaluation_seconds(self):
        return round(engine.now(self.federation.device) - self.clock - self.row["seconds"], 4)

    def log(self, global_=None, personal=None, **more):
        """Takes this round's measures (evaluate's, evaluate_clients', and others by name) and
        prints them."""
        self.check_kept()
        self.stop_clock()
        if global_:
            self.row["global"] = global_
        if personal:
            self.per_client = personal["per_client"]
            self.row["personal"] = without_clients(personal)
        # tensors and arrays become lists
        more = tree_map(lambda z: z.tolist() if hasattr(z, "tolist") else z, more)
        self.row.update(more, evaluation_seconds=self.evaluation_seconds())
        words = [f"round {self.row['round']:>{len(str(self.args.rounds))}}"]
        if global_:
            words.append("global top1 {top1:.4f} top5 {top5:.4f} loss {loss:.4f} ece {ece:.4f}"
                         .format(**global_))
        if personal:
            words.append("personal {mean:.4f} +- {std:.4f} worst tenth {worst_decile:.4f}"
                         .format(**personal))
            if "val_mean" in personal:
                words[-1] += f" validation {personal['val_mean']:.4f}"
        say("  |  ".join([*words, f"{self.row['seconds']:.2f} s"]))
        if self.board:
            for part, measures in (("global", global_), ("personal", self.row.get("personal"))):
                for name, value in (measures or {}).items():
                    self.board.add_scalar(f"{part}/{name}", value, self.row["round"])
            self.board.flush()

    def is_finite(self):
        """Whether all numbers in the state and this round's losses are finite, in all processes."""
        losses = [self.row[part]["loss"] for part in ("global", "personal") if part in self.row]
        sound = np.isfinite(losses).all() and all(map(is_finite, vars(self.state).values()))
        return not self.anywhere(not sound)

    def anywhere(self, what):
        """Whether `what` is true in any process."""
        flag = torch.tensor(float(what), device=self.federation.device)
        return bool(self.federation.all_reduce(flag))

    def diverge(self):
        say(f"round {self.row['round']}: diverged, a weight or a loss is not finite; the state "
            "before it is kept")
        for part in ("global", "personal", "top1", "evaluation_seconds"):
            self.row.pop(part, None)
        self.finish("diverged", [{**self.row, "diverged": True}])
        raise SystemExit(3)

    def interrupt(self, number, frame):
        """Ctrl-C or SIGTERM: writes what the last complete round left, and ends the program. Of
        several processes only the record is written, since they need not be in the same round: the
        states of the last evaluation stay."""
        gpu = self.federation.device.type == "cuda"
        if self.saving or gpu and torch.cuda.is_current_stream_capturing():
            self.pending = number  # too early: end_round and save look at it
            return
        self.federation.stop = True  # clients give up at their next minibatch
        for known in self.handlers:
            signal.signal(known, signal.SIG_IGN)
        codes = [128 + number]

        def end():
            tqdm.set_lock(threading.RLock())  # this thread may hold the old one for good
            try:
                self.finish("interrupted")
            except SystemExit as refusal:  # which would end this thread alone
                codes.append(refusal.code)

        thread = threading.Thread(target=end)  # since this one may be in the midst of a vmap
        thread.start()
        thread.join()
        raise SystemExit(codes[-1])

    # The record and the state

    def save(self, failed=(), end=False):
        """Writes the record. Writes the state at the end of the run; before, only while writing
        states has taken less than a second plus a twentieth of the run's time. failed: the row of a
        round that diverged."""
        if self.pending:
            self.interrupt(self.pending, None)
        self.saving = True  # so that an interruption waits
        start = time.monotonic()
        alone = self.federation.processes == 1
        if not self.complete and (alone or self.status != "interrupted"):
            due = end or self.seconds_writing <= 1 + 0.05 * (start - self.begun)
            if not self.anywhere(not due):
                self.write(self.state_file, self.put_state)
        self.seconds_writing += time.monotonic() - start
        if is_main_process() and not self.complete:
            text = json.dumps(without_nan(self.record(failed)), indent=1) + "\n"
            self.write(self.record_file, lambda part: part.write_text(text), alone=True)
        self.saving = False
        if self.pending:
            self.interrupt(self.pending, None)

    def write(self, path, put, alone=False):
        """Has put(part) write a file, which then takes the place of `path`: whole or, if the disk
        is full, not at all. Several processes replace theirs together; alone: this is a file of
        one."""
        part = path.with_name(path.name + ".part")
        self.unwritten.pop(path, None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            put(part)
        except (OSError, RuntimeError) as problem:  # RuntimeError: torch.save's
            full = shutil.disk_usage(path.anchor or ".").free < 2**20
            with contextlib.suppress(OSError):
                full = shutil.disk_usage(path.parent).free < 2**20
            why = "No space left on device" if full else "it could not be written whole"
            self.unwritten[path] = getattr(problem, "strerror", None) or why
            say(f"disk    {path} can't be written: {self.unwritten[path]}")
        failed = path in self.unwritten
        if failed if alone else self.anywhere(failed):
            with contextlib.suppress(OSError):
                part.unlink()
        else:
            try:
                os.replace(part, path)
            except OSError as problem:  # on Windows: somebody reads it
                self.unwritten[path] = problem.strerror
                say(f"disk    {path} can't be replaced: {problem.strerror}")

    def save_models(self):
        """model.pt, the global model as a state dict of its module, and clients.pt with
        --save-clients."""
        federation, state, net = self.federation, self.kept.state, self.federation.net
        if self.model and is_main_process():
            given = callable(self.model)
            w = self.model(SimpleNamespace(**state)) if given else state[self.model]
            self.write(self.out / "model.pt", lambda part: torch.save(net.state_dict(w), part),
                       alone=True)
        if self.args.save_clients and self.models and self.status == "finished":
            of = self.models if callable(self.models) else state[self.models].__getitem__
            W = federation.gather(torch.cat([of([row]) for row in federation.rows()]))
            if is_main_process():
                self.write(self.out / "clients.pt",
                           lambda part: torch.save(net.state_dict(W), part), alone=True)

    def put_state(self, part):
        self.check_kept()
        kept, history, per_client = self.kept
        state = {}
        for name, z in kept.items():
            z = z.all if isinstance(z, Rows) else z
            state[name] = z.cpu() if torch.is_tensor(z) else z
        with open(part, "wb") as file:
            torch.save({"state": state, "history": history, "per_client": per_client,
                        "environment": self.environment, **self.identity}, file)

    def status_on_disk(self):
        """The status of the record in the folder; None if there is none. Refuses what is no
        record."""
        try:
            found = self.record_file
            return json.loads(found.read_text())["status"] if found.exists() else None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            refuse(f"{found} can't be read as a record ({type(problem).__name__}); move it "
                   "elsewhere, or use another --out")

    def saved(self, status):
        """What lies on the disk for --resume, or None if nothing does. Refuses another run's."""
        path, processes, saved = self.state_file, self.federation.processes, None
        if path.exists():
            saved = self.read_state(path)
        elif others := self.states():
            other, count = next(iter(others.items()))
            if count == processes:
                refuse(f"{path} is missing beside {other}; start anew", alone=True)
            refuse(f"{other} belongs to a run with {count} process{'es' * (count > 1)}, this one "
                   f"has {processes}; use as many, or another --out")
        elif status == "finished":
            refuse(f"{self.record_file} is finished, and there is no {path.name} to resume; to run "
                   "it again, leave out --resume")
        else:
            self.federation.notes.append(f"resume  nothing to resume in {self.out}; starting at "
                                         "round 1")
        rounds = len(saved["history"]) if saved else 0
        total = torch.tensor(rounds, device=self.federation.device)
        if self.federation.all_reduce(total) != rounds * processes:
            refuse(f"{path} has another number of rounds than the other processes' states; start "
                   "anew")
        return saved

    def read_state(self, path):
        for z in vars(self.state).values():
            if isinstance(z, Rows):
                z.all = None  # makes room for what is read
        try:
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise ValueError
            saved = torch.load(path, map_location="cpu", weights_only=True)
            parts = *self.identity, "environment", "state", "history"
            then = {name: saved[name] for name in parts}
        except Exception as problem:  # torch.load raises nearly anything on a broken file
            refuse(f"{path} can't be read ({type(problem).__name__}); use another --out, or remove "
                   "it", alone=True)
        file, *_ = self.identity["sources"]
        if file not in then["sources"]:
            writer = next(iter(then["sources"]), "another file")
            refuse(f"{path} was written by {writer}, not by {file}; use another --out")
        done = len(then["history"])
        args = renamed(then["args"])
        for name in {**args, **self.identity["args"]}:
            a, b = args.get(name), self.identity["args"].get(name)
            more_rounds = name == "rounds" and not self.fixed_rounds and done < b
            if a != b and name not in FREE and not more_rounds:
                flag = "--" + name.strip("_").replace("_", "-")
                why = f": {self.fixed_rounds or f'{done} are done'}" if name == "rounds" else ""
                refuse(f"{path} belongs to {flag} {a}, this run has {b}{why}; use the same or "
                       "another --out")
        for name, digest in self.identity["sources"].items():
            if then["sources"].get(name) != digest:
                refuse(f"{path} was made by another version of {name}; use that version or another "
                       "--out")
        for name in ("data", "split"):
            if then[name] != self.identity[name]:
                refuse(f"{path} belongs to other {name}: {then[name]}, now {self.identity[name]}; "
                       "use another --out")
        return saved

    def states(self):
        """The states in the folder: path -> how many processes its run had."""
        paths = [*self.out.glob("state.pt"), *self.out.glob("state-*-of-*[0-9].pt")]
        return {path: int(path.stem.partition("-of-")[2] or 1) for path in paths}

    def restore(self, saved):
        """Puts a saved state back; returns its history and accuracies per client."""
        device, history = self.federation.device, saved["history"]
        for name, z in saved["state"].items():
            if isinstance(getattr(self.state, name), Rows):
                getattr(self.state, name).load(z)
            else:
                setattr(self.state, name, z.to(device) if torch.is_tensor(z) else z)
        say(f"resume  {self.state_file}: {len(history)} of {self.args.rounds} rounds are done")
        past, now = saved["environment"], self.environment
        if past["torch"] != now["torch"]:
            say(f"resume  they were done by torch {past['torch']}; the last bits of the others may "
                "differ")
        left = len(history) < self.args.rounds and not self.on_target(history)
        if left and any(past.get(name) != now[name] for name in now):
            past = {**past, "resumed": [*past.get("resumed", []), now]}
        self.environment = past
        return history, saved["per_client"]

    def put_aside(self):
        """What an earlier run left in the folder is kept under another name."""
        paths = [self.state_file]  # each process its own
        if is_main_process():
            processes = self.federation.processes
            others = [path for path, count in self.states().items() if count != processes]
            models = self.out / "model.pt", self.out / "clients.pt"
            events = self.out.glob("events.out.tfevents.*[0-9]")
            paths = [self.record_file, self.state_file, *models, *events, *others]
        for path in paths:
            if path.exists():
                os.replace(path, path.with_suffix(".previous" + path.suffix))
                say(f"kept    the earlier {path.name} in {self.out} as "
                    f"{path.stem}.previous{path.suffix}")

    def record(self, failed=()):
        """result.json's content; docs/run.md says what each field means."""
        federation, net = self.federation, self.federation.net
        split, data, (_, history, per_client) = federation.whole_split, federation.data, self.kept
        final, best = {}, {}
        for part, key in (("global", "top1"), ("personal", "mean")):
            seen = [{**row[part], "round": row["round"]} for row in history if part in row]
            if seen:
                final[part], best[part] = seen[-1], max(seen, key=lambda measures: measures[key])
        if "personal" in final:
            final["personal"] = {**final["personal"], "per_client": per_client}
        own = ("round", "seconds", "evaluation_seconds", "top1", "bytes_up", "bytes_down", "global",
               "personal")
        evaluated = (row for row in reversed(history) if row.keys() & {"global", "personal"})
        final.update({name: value for name, value in next(evaluated, {}).items()
                      if name not in own})  # the algorithm's own measures
        history = [*history, *failed]
        self.environment["numbers"] = numbers(self.algorithm)  # baselines.py names its method late
        if federation.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(federation.device)
            self.environment["way"] = federation.used
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if federation.failed:
            self.environment["slower"] = federation.failed
        reached = {f"{target:g}": rounds_to(target, history) for target in self.targets or ()}
        return {
            "algorithm": self.algorithm, "status": self.status,
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
            "bytes_up": sum(row["bytes_up"] for row in history),
            "bytes_down": sum(row["bytes_down"] for row in history),
            "seconds_per_round": (statistics.median(row["seconds"] for row in history)
                                  if history else None),
            "peak_memory_mb": peak and round(peak / 2**20, 1),
        }

    def finish(self, status, failed=()):
        """Writes the record and the models, prints the record's table, and draws the plots if they
        are wanted; not to be interrupted."""
        if status != "interrupted":  # then nothing interrupts any more
            for number in self.handlers:
                signal.signal(number, signal.SIG_IGN)
        self.status, self.pending = status, None
        for rows in self.federation.all_rows:
            rows.undo()  # what a round that was not completed has changed
        self.bar.close()
        self.save(failed, end=True)
        if status != "diverged":
            self.save_models()
        self.show(self.record(failed))
        self.federation.graphs.clear()
        if self.federation.processes > 1 and status != "interrupted":  # else NCCL might wait
            atexit.register(dist.destroy_process_group)
        if self.unwritten:
            self.end_unwritten(status)
        go_on = "; to go on: the same command with --resume" * (status == "interrupted")
        say(f"record  {self.record_file}{go_on}")
        if self.args.plot and status == "finished" and is_main_process():
            self.federation.plot(self.record(), self.out, self.marks)

    def show(self, record):
        """Prints the table of a record."""
        minutes = [sum(row.get(name, 0) for row in record["rounds"]) / 60
                   for name in ("seconds", "evaluation_seconds")]
        say(f"\n{self.algorithm} on {self.federation.data.name}, {record['status']} after "
            f"{len(record['rounds'])} of {self.args.rounds} rounds: {minutes[0]:.1f} min of "
            f"training, {minutes[1]:.1f} of evaluation, {record['bytes_up'] / 1e6:.1f} MB up, "
            f"{record['bytes_down'] / 1e6:.1f} MB down")
        for part, columns in (("global", ("top1", "top5", "loss", "ece", "mce")),
                              ("personal", ("mean", "weighted_mean", "std", "worst_decile", "top5",
                                            "loss", "ece", "mce"))):
            if part in record["final"]:
                say(f"{part:>10}" + "".join(f"{name:>14}" for name in ("round", *columns)))
                for when in ("final", "best"):
                    measures = record[when][part]
                    # a huge loss is written so that it stays in its column
                    values = [f"{measures[name]:>14.4f}" for name in columns]
                    values = [text if len(text) <= 14 else f"{float(text):>14.4e}"
                              for text in values]
                    say(f"{when:>10}{measures['round']:>14}" + "".join(values))
        for target, rounds in record.get("rounds_to", {}).items():
            say(f"target  {target}: "
                + (f"after {rounds:.1f} rounds" if rounds else "not reached"))

    def end_unwritten(self, status):
        """Says what is lost where files could not be written; ends the program unless the record is
        complete."""
        path, why = next(iter(self.unwritten.items()))
        if self.record_file not in self.unwritten and status == "finished":
            say(f"note    the record is complete; {path.name} is missing: {why}")
        elif self.state_file not in self.unwritten:
            refuse(f"{path} can't be written: {why}; mend that, and start again with --resume: "
                   f"{self.state_file} has all rounds", alone=True)
        else:
            older = "goes on from an earlier round" if self.state_file.exists() else "starts anew"
            refuse(f"{path} can't be written: {why}; mend that; the same command with --resume "
                   f"{older}", alone=True)


def summary_writer():
    """The class of TensorBoard's writers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        refuse("--tensorboard needs the package tensorboard: pip install tensorboard")
    return SummaryWriter


def rounds_to(target, history):
    """After how many rounds the accuracy, best so far, reaches the target: linear between two
    rounds. None if it does not."""
    measured = [row for row in history if "top1" in row]
    t, best = [row["round"] for row in measured], [row["top1"] for row in measured]
    best = np.maximum.accumulate(best)
    i = int(np.searchsorted(best, target))  # the first that is at least the target
    if i == len(t):
        return None
    if not i:
        return float(t[0])
    return float(t[i] - (best[i] - target) / (best[i] - best[i - 1]) * (t[i] - t[i - 1]))


def without_clients(measures):
    """Those of evaluate_clients without the list of all clients' accuracies."""
    return {name: value for name, value in measures.items() if name != "per_client"}


def without_nan(tree):
    """JSON has no NaN: null instead."""
    return tree_map(lambda z: None if isinstance(z, float) and not np.isfinite(z) else z, tree)


@contextlib.contextmanager
def locked(out, federation):
    """Keeps the folder `out` for this run alone: refuses it if another one is writing to it."""
    lock, free = filelock.FileLock(out / ".lock"), True
    if is_main_process():
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            free = False
        except (OSError, NotImplementedError):
            pass  # a file system without locks
    try:
        if federation.all_reduce(torch.tensor(float(not free), device=federation.device)):
            refuse(f"another run is writing to {out}; use another --out")
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows removes no open file
                os.remove(lock.lock_file)
            lock.release()


def commit(sources):
    """The git commit of this checkout, with + if one of the files `sources` is not as it is there;
    None outside of one."""
    here = pathlib.Path(__file__).resolve().parent
    sources = [pathlib.Path(path).resolve() for path in sources]

    def git(*words):
        command = ["git", "-C", here, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        foreign = any(here not in path.parents for path in sources)
        changed = foreign or git("status", "--porcelain", "--ignored", "--", *sources)
        return git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


# --------------------------------------------------------------------------------------------------
# What clients keep


class Rows:
    """What the clients of this process keep between rounds, a row each: rows[S] are copies of those
    of the clients S (or of one), on the device; rows[S] = x puts others in their place.

    all: the whole tensor [rows, ...]. It lies on the device while all Rows together take at most a
    quarter of the memory that is free there, else in the host's memory. Until a round is complete,
    the rows that it replaced are remembered: `accept` forgets them, `undo` puts them back.
    """

    def __init__(self, fed, first):
        """first(i): row number i."""
        like = first(0)
        n = len(fed.clients)
        size = like.nbytes * n
        near = sum(rows.all.nbytes for rows in fed.all_rows if not rows.far)
        far = 4 * (near + size) > free_memory(fed.device) + near
        fed.all_rows.append(self)
        self.device, self.far, self.replaced = fed.device, far, []
        try:
            self.all = torch.empty((n, *like.shape), dtype=like.dtype,
                                   device="cpu" if far else fed.device)
        except RuntimeError as problem:
            why = engine.first_line(problem)
            refuse(f"{n} clients keep {size / 1e9:.1f} GB between rounds ({why}); "
                   "use fewer --clients or a smaller --model", alone=True)
        for i in range(n):
            self.all[i] = first(i)

    def __getitem__(self, S):
        S = self.numbers(S)
        self.make_room()
        x = self.all.new_empty((*np.shape(S), *self.all.shape[1:]), device=self.device)
        for row, k in zip(x if np.ndim(S) else x[None], np.atleast_1d(S)):
            row.copy_(self.all[int(k)])
        return x

    def __setitem__(self, S, x):
        if isinstance(x, Sampled):
            raise TypeError("rows[S] = other.of(T) would copy nothing; write rows[S] = other[T]")
        S = self.numbers(S)
        self.make_room()
        x = x.expand(*np.shape(S), *self.all.shape[1:])  # one row for all of S, or a row each
        index = torch.from_numpy(np.atleast_1d(S)).to(self.all.device)
        self.replaced.append((index, self.all[index], is_finite(x)))
        for row, k in zip(x if np.ndim(S) else x[None], np.atleast_1d(S)):
            self.all[int(k)].copy_(row)

    def make_room(self):
        """Has glibc return the free memory that engine.keep_memory keeps: these are large tensors,
        which would lie between the gaps."""
        if self.device.type == "cpu" and self.all.nbytes > 2**30:
            with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    def numbers(self, S):
        """Those of the rows S: a number, a list or an array of numbers, a slice, or a mask."""
        return np.arange(len(self.all))[S if np.size(S) else []]

    def of(self, S):
        """self[S] for Federation.train, which fetches a row when its client's turn comes."""
        return Sampled(self, S)

    def sum(self, dim=0):
        """Over this process's clients: [...]. dim: as a tensor's sum, for Federation.sum."""
        return self.all.sum(0).to(self.device)

    def load(self, x):
        self.all = x if self.far else x.to(self.device)

    def accept(self):
        self.replaced.clear()

    def undo(self):
        while self.replaced:
            S, x, _ = self.replaced.pop()
            self.all[S] = x


class Sampled:
    """Rows of the clients S: of shape [m, ...], but only what is asked for by its place among them
    is a tensor."""

    def __init__(self, rows, S):
        self.rows, self.S = rows, S

    def __getitem__(self, i):
        S = self.S[i]
        return self.rows[S] if np.ndim(S) else self.rows.all[int(S)].to(self.rows.device)


def free_memory(device):
    """Bytes of a GPU that nothing holds; what PyTorch keeps for the next tensor is free, too."""
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def is_finite(z):
    """Whether all numbers of a tensor are, or of what this round has put into Rows; x.isfinite()
    would make tensors as large as x."""
    if isinstance(z, float):
        return bool(np.isfinite(z))
    if isinstance(z, Rows):
        return all(sound for _, _, sound in z.replaced)
    return (not torch.is_tensor(z) or not z.numel()
            or bool(torch.stack(torch.aminmax(z)).isfinite().all()))
