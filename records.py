"""Runs: the loop over the rounds, the record (result.json), the state on disk, resuming, interruption."""

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from typing import NamedTuple

import filelock
import numpy as np
import torch
from torch.utils._pytree import tree_map
from tqdm import tqdm

import engine
from engine import device_name, is_main_process, refuse

try:
    import resource
except ImportError:  # on Windows
    resource = None

SHARED = ("common.py", "datasets.py", "engine.py", "records.py")  # what, beside the algorithm's file, a result depends on
FREE = ("out", "resume", "plot", "parallel", "engine", "data_dir", "export")  # what a run may change when it is resumed


class Kept(NamedTuple):
    """What the last complete round left."""

    state: dict
    history: list  # the rows of all rounds
    per_client: list  # accuracies at the last evaluation; None before it


class Run:
    """The rounds of one run: its loop, its record, its state on disk.

        run = Run(__file__, federation)
        for t, S in run.rounds(state):          # restores the state if --resume
            state.w = ...                       # the round; tensors are replaced, never changed in place
            state.v[S] = ...                    # rows of federation.per_client: these are changed in place
            run.sent(up=..., down=...)
            if run.evaluates():                 # stops the round's clock; True every --eval-every rounds
                run.log(federation.evaluate(state.w), federation.evaluate_clients(...))

    state: any object whose attributes are what survives a round: tensors, Rows, numbers, strings, None. `rounds` ends the
    program when the run diverges (exit code 3) or is interrupted (130 for Ctrl-C); record and state are then on disk. Do not
    leave the loop by `break`: its round would be lost.
    """

    def __init__(self, file, federation, fixed_rounds=""):
        """fixed_rounds: why --resume can't change --rounds, where the algorithm depends on their number."""
        self.algorithm = pathlib.Path(file).stem
        self.federation, self.args = federation, federation.args
        args = self.args
        self.out = pathlib.Path(args.out or f"runs/{self.algorithm}-{federation.data.name}-{args.seed}")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if is_main_process():
                tempfile.TemporaryFile(dir=self.out).close()
        except OSError as problem:
            refuse(f"--out {self.out} can't be written to: {problem.strerror}")
        rank, processes = federation.rank, federation.processes
        self.state_file = self.out / ("state.pt" if processes == 1 else f"state-{rank}-of-{processes}.pt")
        sources = [pathlib.Path(file), *(pathlib.Path(__file__).parent / name for name in SHARED)]
        sources += [pathlib.Path(name.rpartition(":")[0]) for name in (args.model, args.split) if ":" in name]  # of a user's own
        for path in sources:
            if any(path.name == other.name and path.resolve() != other.resolve() for other in sources):
                refuse(f"two files of this run are called {path.name}: the record names files by their names; rename yours")
        self.identity = {  # what a state must share with the run that resumes it
            "args": {**{name: str(z) if isinstance(z, os.PathLike) else z for name, z in vars(args).items()},
                     "device": str(federation.device)},
            "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources},
            "data": federation.data.fingerprint(), "split": federation.whole_split.fingerprint(),
        }
        self.environment = {
            "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
            "cuda": torch.version.cuda, "device": device_name(federation.device), "processes": processes,
            "commit": commit(sources), "sources": self.identity["sources"],
        }
        self.status, self.handlers, self.saving, self.pending = "unfinished", {}, False, None
        self.complete = False  # True: the record on disk is finished, and this call adds no rounds
        self.targets = getattr(args, "target", None)  # accuracies
        self.begun, self.seconds_writing, self.unwritten = time.monotonic(), 0.0, {}  # unwritten: what went wrong, by file
        self.fixed_rounds = fixed_rounds
        self.marks = {}  # for curves.png: a round -> what begins with it

    # The loop

    def rounds(self, state, among=None):
        """Yields (t, S_t) for t = 0 .. T-1. After each it completes the round: its row of the record, its state, the files.
        S_t: rows of this process (Federation.sample), drawn from the clients `among`."""
        with self.open(state):  # after --resume `state` is as it was saved
            while (t := len(self.kept.history)) < self.last:  # rounds that are done, and that are to be done
                self.begin_round(t)
                yield t, self.federation.sample(t, among)
                self.end_round()
            self.finish("finished")

    @contextlib.contextmanager
    def open(self, state):
        """Begins, or goes on after --resume. All that can be refused is, before anything is printed."""
        self.state, self.names = state, set(vars(state))
        with locked(self.out, self.federation):
            saved = self.saved() if self.args.resume else None
            self.federation.describe()
            history, per_client = self.restore(saved) if saved else ([], None)
            if not saved:
                self.put_aside()
            self.keep(history, per_client)
            self.last = len(history) if self.on_target(history) else self.args.rounds
            self.bar = tqdm(total=self.args.rounds, initial=len(history), desc=self.algorithm, unit="round", leave=False,
                            dynamic_ncols=True, disable=None if is_main_process() else True)
            if threading.current_thread() is threading.main_thread():
                self.handlers = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in self.handlers.items():
                    signal.signal(number, handler)

    def begin_round(self, t):
        self.row, self.per_client = {"round": t + 1, "seconds": None, "bytes_up": 0, "bytes_down": 0}, self.kept.per_client
        self.clock = engine.now(self.federation.device)

    def end_round(self):
        """Completes the round's row, keeps what the round left, and writes it if the round was evaluated. May end the program."""
        self.stop_clock()
        sent = torch.tensor([self.row["bytes_up"], self.row["bytes_down"]], device=self.federation.device)
        self.row["bytes_up"], self.row["bytes_down"] = self.federation.all_reduce(sent).tolist()
        if not self.is_finite():
            self.diverge()
        self.keep([*self.kept.history, self.row], self.per_client)
        self.bar.update()
        if self.pending or (self.row.keys() & {"global", "personal"} and self.row["round"] < self.last):
            self.save()

    def keep(self, history, per_client):
        """The round is complete: an interruption from here on writes this state."""
        self.saving = True  # so that an interruption waits
        for rows in self.federation.all_rows:
            rows.accept()
        self.versions = {name: z._version for name, z in vars(self.state).items() if torch.is_tensor(z)}
        self.kept, self.saving = Kept(dict(vars(self.state)), history, per_client), False

    def check_kept(self):
        """Refuses a method that --resume would not serve: that changes a tensor of its state in place, or adds to the state."""
        if late := vars(self.state).keys() - self.names:
            refuse(f"the loop adds {', '.join(late)} to `state`; set every name before run.rounds(state)")
        for name, z in vars(self.state).items():
            # a change in place of other things would not be seen, or torch.load would not read them
            if not torch.is_tensor(z) and type(z) not in (engine.Rows, int, float, bool, str, type(None)):
                refuse(f"state.{name} is a {type(z).__name__}; keep tensors and Python's own numbers")
        for name, version in self.versions.items():
            if self.kept.state[name]._version != version:
                refuse(f"state.{name} was changed in place; write state.{name} = state.{name} + ... instead of +=, and begin anew")

    def stop_clock(self):
        self.row["seconds"] = self.row["seconds"] or round(engine.now(self.federation.device) - self.clock, 4)

    def sent(self, up, down):
        """Counts what this round sent: numbers from clients to the server and back, 4 bytes each."""
        self.row["bytes_up"] += 4 * up
        self.row["bytes_down"] += 4 * down

    def evaluates(self, w=None):
        """Stops the round's clock. Says whether this round is evaluated: each --eval-every rounds, and the last one.
        w [d]: the global model. With --target it is measured here; when it has reached all targets, this round is the last."""
        self.stop_clock()
        self.last = self.measure(w) if self.targets else self.args.rounds
        return self.row["round"] % self.args.eval_every == 0 or self.row["round"] == self.last

    def measure(self, w):
        """Measures the accuracy of w [d]. Gives the last round: this one, if all of --target are reached."""
        top1 = torch.tensor([self.federation.evaluate(w)["top1"]], dtype=torch.double, device=self.federation.device)
        self.row["top1"] = self.federation.mean(top1).item()  # one number for all processes
        self.row["evaluation_seconds"] = self.evaluation_seconds()
        return self.row["round"] if self.on_target([self.row]) else self.args.rounds

    def on_target(self, history):
        """Whether the accuracy has reached all of --target."""
        return bool(self.targets) and any(row.get("top1", 0) >= max(self.targets) for row in history)

    def evaluation_seconds(self):
        return round(engine.now(self.federation.device) - self.clock - self.row["seconds"], 4)

    def log(self, global_=None, personal=None, **more):
        """Takes this round's measures (evaluate's, evaluate_clients', and others by name) and prints them."""
        self.check_kept()
        self.stop_clock()
        if global_:
            self.row["global"] = global_
        if personal:
            self.per_client = personal["per_client"]
            self.row["personal"] = without_clients(personal)
        more = tree_map(lambda z: z.tolist() if hasattr(z, "tolist") else z, more)  # tensors and arrays
        self.row.update(more, evaluation_seconds=self.evaluation_seconds())
        words = [f"round {self.row['round']:>{len(str(self.args.rounds))}}"]
        if global_:
            words.append("global top1 {top1:.4f} top5 {top5:.4f} loss {loss:.4f} ece {ece:.4f}".format(**global_))
        if personal:
            words.append("personal {mean:.4f} +- {std:.4f} worst tenth {worst_decile:.4f}".format(**personal))
            if "val_mean" in personal:
                words[-1] += f" validation {personal['val_mean']:.4f}"
        self.bar.write("  |  ".join(words + [f"{self.row['seconds']:.2f} s"]))

    def is_finite(self):
        """Whether all numbers in the state and this round's losses are finite, in all processes."""
        losses = [self.row[part]["loss"] for part in ("global", "personal") if part in self.row]
        wrong = not (np.isfinite(losses).all() and all(map(engine.is_finite, vars(self.state).values())))
        return not self.federation.all_reduce(torch.tensor(float(wrong), device=self.federation.device))

    def diverge(self):
        self.bar.write(f"round {self.row['round']}: diverged, a weight or a loss is not finite; the state before it is kept")
        for part in ("global", "personal", "top1", "evaluation_seconds"):
            self.row.pop(part, None)
        self.finish("diverged", [{**self.row, "diverged": True}])
        raise SystemExit(3)

    def interrupt(self, number, frame):
        """Ctrl-C or SIGTERM: writes what the last complete round left, and ends the program. Of several processes only the
        record is written, since they need not be in the same round: the states of the last evaluation stay."""
        capturing = self.federation.device.type == "cuda" and (
            torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())  # the step before a capture
        if self.saving or capturing:  # too early: end_round and save look at self.pending
            self.pending = number
            return
        self.federation.stop = True  # the workers give up at their next minibatch
        with engine.outside_of_steps():
            self.finish("interrupted")
        raise SystemExit(128 + number)

    # The record and the state

    def save(self, failed=(), end=False):
        """Writes the record. Writes the state at the end of the run; before, only while writing states has taken less than a
        second plus a twentieth of the run's time. failed: the row of a round that diverged."""
        if self.pending:
            self.interrupt(self.pending, None)
        self.saving = True  # so that an interruption waits
        federation, start = self.federation, time.monotonic()
        if not self.complete and (federation.processes == 1 or self.status != "interrupted"):
            due = end or self.seconds_writing <= 1 + 0.05 * (start - self.begun)
            if not federation.all_reduce(torch.tensor(float(not due), device=federation.device)):
                self.write(self.state_file, self.put_state)
        self.seconds_writing += time.monotonic() - start
        if is_main_process() and not self.complete:
            text = json.dumps(without_nan(self.record(failed)), indent=1) + "\n"
            self.write(self.out / "result.json", lambda part: part.write_text(text), alone=True)
        self.saving = False
        if self.pending:
            self.interrupt(self.pending, None)

    def write(self, path, put, alone=False):
        """Has put(part) write a file, which then takes the place of `path`: whole or, if the disk is full, not at all. Several
        processes replace theirs together; alone: this is a file of one process."""
        part = path.with_name(path.name + ".part")
        self.unwritten.pop(path, None)
        try:
            put(part)
        except (OSError, RuntimeError) as problem:  # RuntimeError: torch.save's
            self.unwritten[path] = getattr(problem, "strerror", None) or engine.first_line(problem)
            self.bar.write(f"disk    {path} can't be written: {self.unwritten[path]}")
        failed = torch.tensor(float(path in self.unwritten), device=self.federation.device)
        if not alone:
            failed = self.federation.all_reduce(failed)
        if failed:
            with contextlib.suppress(OSError):
                part.unlink()
        else:
            os.replace(part, path)

    def put_state(self, part):
        self.check_kept()
        kept, history, per_client = self.kept
        state = {}
        for name, z in kept.items():
            if isinstance(z, engine.Rows):
                z.undo()
                z = z.all
            state[name] = z.cpu() if torch.is_tensor(z) else z
        with open(part, "wb") as file:
            torch.save({"state": state, "history": history, "per_client": per_client, "environment": self.environment,
                        **self.identity}, file)

    def saved(self):
        """What lies on the disk for --resume, or None if nothing does. Refuses another run's."""
        path, record = self.state_file, self.out / "result.json"
        try:
            status = json.loads(record.read_text())["status"] if record.exists() else None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            refuse(f"{record} can't be read as a record ({type(problem).__name__}); move it elsewhere, or use another --out")
        others = self.states()
        if not path.exists() and others:
            other, count = next(iter(others.items()))
            if count == self.federation.processes:
                refuse(f"{path} is missing beside {other}; start anew", alone=True)
            refuse(f"{other} belongs to a run with {count} process{'es' * (count > 1)}, this one has "
                   f"{self.federation.processes}; use as many, or another --out")
        if not path.exists() and status == "finished":
            refuse(f"{record} is finished, and there is no {path.name} to resume; to run it again, leave out --resume")
        if not path.exists():
            self.federation.notes.append(f"resume  nothing to resume in {self.out}; starting at round 1")
            saved = None
        else:
            saved = self.read_state(path)
        rounds = len(saved["history"]) if saved else 0
        self.complete = status == "finished" and (rounds == self.args.rounds or self.on_target(saved["history"]))
        if self.federation.all_reduce(torch.tensor(rounds, device=self.federation.device)) != rounds * self.federation.processes:
            refuse(f"{self.state_file} has another number of rounds than the other processes' states; start anew")
        return saved

    def read_state(self, path):
        rows = [z for z in vars(self.state).values() if isinstance(z, engine.Rows)]
        for z in rows:
            z.all = None  # makes room for what is read
        try:
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise ValueError
            saved = torch.load(path, map_location="cpu", weights_only=True)
            then = {name: saved[name] for name in (*self.identity, "environment", "state", "history")}
        except Exception as problem:  # torch.load raises nearly anything on a broken file
            refuse(f"{path} can't be read ({type(problem).__name__}); use another --out, or remove it", alone=True)
        file, *_ = self.identity["sources"]
        if file not in then["sources"]:
            refuse(f"{path} was written by {next(iter(then['sources']), 'another file')}, not by {file}; use another --out")
        done = len(then["history"])
        for name in {**then["args"], **self.identity["args"]}:
            a, b = then["args"].get(name), self.identity["args"].get(name)
            if a != b and name not in FREE and not (name == "rounds" and done < b and not self.fixed_rounds):
                flag = "--" + name.strip("_").replace("_", "-")
                why = f": {self.fixed_rounds or f'{done} are done'}" if name == "rounds" else ""
                refuse(f"{path} belongs to {flag} {a}, this run has {b}{why}; use the same or another --out")
        for name, digest in self.identity["sources"].items():
            if then["sources"].get(name) != digest:
                refuse(f"{path} was made by another version of {name}; use that version or another --out")
        for name in ("data", "split"):
            if then[name] != self.identity[name]:
                refuse(f"{path} belongs to other {name}: {then[name]}, now {self.identity[name]}; use another --out")
        return saved

    def states(self):
        """The states in the folder: path -> how many processes its run had."""
        paths = [*self.out.glob("state.pt"), *self.out.glob("state-*-of-*[0-9].pt")]
        return {path: int(path.stem.partition("-of-")[2] or 1) for path in paths}

    def restore(self, saved):
        """Puts a saved state back; returns its history and accuracies per client."""
        for name, z in saved["state"].items():
            if isinstance(getattr(self.state, name), engine.Rows):
                getattr(self.state, name).load(z)
            else:
                setattr(self.state, name, z.to(self.federation.device) if torch.is_tensor(z) else z)
        print(f"resume  {self.state_file}: {len(saved['history'])} of {self.args.rounds} rounds are done")
        past, now = saved["environment"], self.environment
        if past["torch"] != now["torch"]:
            print(f"resume  they were done by torch {past['torch']}; the last bits of the others may differ")
        left = len(saved["history"]) < self.args.rounds and not self.on_target(saved["history"])
        more = [now] if left and any(past[name] != now[name] for name in now) else []
        self.environment = {**past, "resumed": past.get("resumed", []) + more} if more else past
        return saved["history"], saved["per_client"]

    def put_aside(self):
        """What an earlier run left in the folder is kept under another name."""
        paths = [self.state_file]  # each process its own
        if is_main_process():
            others = [path for path, count in self.states().items() if count != self.federation.processes]
            paths = [self.out / "result.json", self.state_file, *others]
        for path in paths:
            if path.exists():
                os.replace(path, path.with_suffix(".previous" + path.suffix))
                print(f"kept    the earlier {path.name} in {self.out} as {path.stem}.previous{path.suffix}")

    def record(self, failed=()):
        """result.json's content; docs/run.md says what each field means."""
        federation = self.federation
        _, history, per_client = self.kept
        final, best = {}, {}
        for part, key in (("global", "top1"), ("personal", "mean")):
            seen = [{**row[part], "round": row["round"]} for row in history if part in row]
            if seen:
                final[part], best[part] = seen[-1], max(seen, key=lambda measures: measures[key])
        if "personal" in final:
            final["personal"] = {**final["personal"], "per_client": per_client}
        own = ("round", "seconds", "evaluation_seconds", "top1", "bytes_up", "bytes_down", "global", "personal")
        newest = next((row for row in reversed(history) if row.keys() & {"global", "personal"}), {})
        final.update({name: value for name, value in newest.items() if name not in own})  # the algorithm's own measures
        history = [*history, *failed]
        if federation.device.type == "cuda":
            peak = max(federation.peak, torch.cuda.max_memory_allocated(federation.device))
            self.environment.update(ways=list(federation.ways.values()), graphs=len(federation.replays))
        else:
            peak = resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if federation.failed:
            self.environment["one_by_one"] = list(federation.failed.values())
        return {
            "algorithm": self.algorithm, "status": self.status, "diverged": self.status == "diverged",
            "args": self.identity["args"], "environment": self.environment,
            "data": {"name": federation.data.name, "fingerprint": self.identity["data"]},
            "split": {"fingerprint": self.identity["split"], "clients": len(federation.whole_split.train),
                      "sizes": [len(index) for index in federation.whole_split.train]},
            "parameters": federation.net.d, "rounds": history, "final": final, "best": best,
            **({"rounds_to": {f"{target:g}": rounds_to(target, history) for target in self.targets}} if self.targets else {}),
            "bytes_up": sum(row["bytes_up"] for row in history), "bytes_down": sum(row["bytes_down"] for row in history),
            "seconds_per_round": statistics.median(row["seconds"] for row in history) if history else None,
            "peak_memory_mb": peak and round(peak / 2**20, 1),
        }

    def finish(self, status, failed=()):
        """Writes the record, prints the table of it, and draws the plots if they are wanted; not to be interrupted."""
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)
        self.status, self.pending = status, None
        self.bar.close()
        self.save(failed, end=True)
        record = self.record(failed)
        minutes = [sum(row.get(name, 0) for row in record["rounds"]) / 60 for name in ("seconds", "evaluation_seconds")]
        done = f"{len(record['rounds'])} of {self.args.rounds} rounds"
        print(f"\n{self.algorithm} on {self.federation.data.name}, {status} after {done}: {minutes[0]:.1f} min of training, "
              f"{minutes[1]:.1f} of evaluation, {record['bytes_up'] / 1e6:.1f} MB up, {record['bytes_down'] / 1e6:.1f} MB down")
        for part, columns in (("global", ("top1", "top5", "loss", "ece", "mce")),
                              ("personal", ("mean", "weighted_mean", "std", "worst_decile", "top5", "loss", "ece", "mce"))):
            if part in record["final"]:
                print(f"{part:>10}" + "".join(f"{name:>14}" for name in ("round", *columns)))
                for when in ("final", "best"):
                    measures = record[when][part]
                    print(f"{when:>10}{measures['round']:>14}" + "".join(f"{measures[name]:>14.4f}" for name in columns))
        for target, rounds in record.get("rounds_to", {}).items():
            print(f"target  {target}: " + (f"after {rounds:.1f} rounds" if rounds else "not reached"))
        if self.unwritten:
            path, why = next(iter(self.unwritten.items()))
            refuse(f"{path} can't be written: {why}; make room, and start again with --resume", alone=True)
        print(f"record  {self.out}/result.json" + "; to go on: the same command with --resume" * (status == "interrupted"))
        if self.args.plot and status == "finished" and is_main_process():
            self.federation.plot(record, self.out, self.marks)


def rounds_to(target, history):
    """After how many rounds the accuracy, best so far, reaches the target: linear between two rounds. None if it does not."""
    measured = [row for row in history if "top1" in row]
    t, best = [row["round"] for row in measured], np.maximum.accumulate([row["top1"] for row in measured])
    i = int(np.searchsorted(best, target))  # the first that is at least the target
    if i == len(t):
        return None
    return float(t[i] - (best[i] - target) / (best[i] - best[i - 1]) * (t[i] - t[i - 1])) if i else float(t[0])


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
    """The git commit of this checkout, with + if one of the files `sources` is not as it is there; None outside of one."""
    here, sources = pathlib.Path(__file__).resolve().parent, [pathlib.Path(path).resolve() for path in sources]

    def git(*words):
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        foreign = any(here not in path.parents for path in sources)
        return git("rev-parse", "HEAD") + ("+" if foreign or git("status", "--porcelain", "--ignored", "--", *sources) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
