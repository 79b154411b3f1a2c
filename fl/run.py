"""Run: the loop over the rounds, the record (result.json), the state on disk, resuming."""

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import tempfile
import time

import filelock
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from . import machine, plots, provenance, records, splits, state
from .machine import is_main_process, refuse, say
from .records import EVERY_ROUND, SHOWN
from .state import PLAIN, Rows, is_finite

ROW = EVERY_ROUND[:4]  # what each row begins with


class Run:
    """The rounds of one run: its loop, its record, its state on disk.

        run = Run(__file__, federation)
        for t in run.rounds(state):             # restores the state if --resume
            S = federation.sample(t)
            state.w = ...
            state.v[S] = ...                    # rows of federation.per_client
            run.sent(up=..., down=...)
            if run.evaluates():                 # stops the round's clock
                run.log(federation.evaluate(state.w), federation.evaluate_clients(...))

    state: any object whose attributes are what survives a round: tensors, Rows, numbers, strings,
    None. `rounds` ends the program when the run diverges (exit code 3) or Ctrl-C is pressed (130);
    --resume goes on from the last state that was written. Do not leave the loop by `break`.
    """

    def __init__(self, file, federation, name=None, fixed_rounds=None, marks=None):
        """name: the algorithm's, by default that of its file. fixed_rounds: why --resume can't
        change --rounds, where an algorithm depends on them; "" where it does not, though a user's
        file names args.rounds. marks: round -> what begins with it,
        for --plot."""
        self.algorithm, self.federation = name or pathlib.Path(file).stem, federation
        self.file, self.args, self.notes = file, federation.args, []
        self.marks, args = marks or {}, self.args
        parts = dict.fromkeys([pathlib.Path(file).stem, self.algorithm, federation.data.name])
        self.out = pathlib.Path(args.out or f"runs/{'-'.join(parts)}-{args.seed}")
        self.record_file, self.state_file = self.out / "result.json", self.out / "state.pt"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if is_main_process():
                tempfile.TemporaryFile(dir=self.out).close()
        except OSError as problem:
            refuse(f"--out {self.out} can't be written to: {problem.strerror}")
        if args.init and pathlib.Path(args.init).resolve() in map(pathlib.Path.resolve,
                                                                  self.replaced()):
            refuse(f"--init {args.init} is a file that this run replaces; use another --out")
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            refuse("--tensorboard needs the package tensorboard: pip install tensorboard")
        files = provenance.sources(file, args)
        self.identity = provenance.identity(federation)
        self.guard = guard(self, fixed_rounds)
        self.fixed_rounds = self.guard.fixed_rounds
        self.environment = provenance.environment(files, federation)
        self.command = provenance.command(file, getattr(args, "argv", None))
        self.history, self.failed = [], []  # the rows of complete rounds, and of one that diverged
        self.per_client = None  # accuracies at the last evaluation
        self.status = "unfinished"
        self.complete = False  # True: the record on disk is finished, and this call adds no rounds
        self.targets, self.last = getattr(args, "target", None), args.rounds  # target: accuracies
        self.measured, self.changes = {}, []  # the state when a round was measured; what it changed
        self.written, self.saved, self.cost = 0, 0.0, 0.0  # rounds on disk; when, and its seconds
        self.unwritten = {}  # name of a file -> why it could not be written
        self.clock = None  # when the round began
        self.board = None  # TensorBoard's SummaryWriter

    def note(self, text):
        """Adds a line to what is printed before the first round."""
        self.notes.append(text)

    @functools.cached_property
    def row(self):  # until the loop sets it
        refuse("run.sent, run.evaluates, run.stop_at_target and run.log belong in the loop "
               "`for t in run.rounds(state)`")

    # The loop

    def rounds(self, state, model="w", clients=None, more_follows=False, personal=None):
        """Yields t = 0 .. T-1. After each it completes the round: its row of the record, its state.

        model: the global model [d], which becomes model.pt in the end: a name in `state`, a
        function of `state`, or None where there is none. clients: the clients' own models [K, d],
        for --save-clients: a name in `state`, or a function of clients S: [m, d]. more_follows: the
        caller goes on after the loop; its run.log adds to the last round, and run.finish() ends it.
        personal: a function of S, for --fine-tune: the models that it begins with, by default
        `clients` or, where there are none, `model`.
        """
        if not hasattr(state, "__dict__") or isinstance(state, type) or self.history:
            refuse("run.rounds(state) takes a State(...), an object with attributes, and a run has "
                   "one loop over it; distinguish phases inside the loop, by t")
        self.state, self.model, self.models = state, model, clients
        self.more_follows, self.personal = more_follows, personal
        self.guard.begin()
        with self.open():  # after --resume `state` is as it was saved
            self.guard.next_round()
            self.infinite = {name for name, z in vars(self.state).items() if not is_finite(z)}
            while len(self.history) < self.last:
                self.begin_round()
                yield len(self.history)
                self.end_round()
                self.guard.next_round()
            self.row = self.history[-1]
            if self.clock is None:  # resumed after the last round
                self.clock = machine.now(self.federation.device) - self.row["seconds"]
            if not more_follows:
                self.finish()

    def begin_round(self):
        self.row = dict(zip(ROW, (len(self.history) + 1, 0, None, None)))
        for rows in self.federation.all_rows:
            rows.finite = True
        self.clock = machine.now(self.federation.device)
        self.guard.begin_round()

    def end_round(self):
        """Completes the row, and writes the state if that is worth it. May end the run."""
        row, now = self.row, vars(self.state)
        row["seconds"] = row["seconds"] or self.elapsed()
        self.guard.end_round()
        if row["round"] % self.args.eval_every:  # evaluated only because it is the last
            self.changes = state.changed(self.measured, state.tensors_of(self.state))
        self.measured = {}
        values = {f"state.{name}": z for name, z in now.items()} | {
            f"the {part} loss": row[part]["loss"] for part in SHOWN if "loss" in row.get(part, ())}
        odd = [name for name, z in values.items()
               if not is_finite(z) and name.removeprefix("state.") not in self.infinite]
        training = self.federation.training
        plain = {name: z for name, z in now.items() if type(z) in PLAIN}
        odd, plain = training.agree((odd, plain))
        now.update(plain)
        now.update({name: training.same(z) for name, z in now.items() if torch.is_tensor(z)})
        if odd:
            self.diverge(odd[0])
        self.per_client = row.pop("per_client", self.per_client)
        self.count_images()
        self.history.append(row)
        self.bar.update()
        training.end_round(len(self.history))
        goes_on = row["round"] < self.last or self.more_follows
        if goes_on and time.monotonic() - self.saved > 20 * self.cost:
            self.save()  # takes at most a twentieth of the time

    def count_images(self):
        """Adds to the row how many images the clients' epochs have passed since the last call."""
        passed = self.federation.passed
        passed_by_all = self.federation.training.total(sum(passed))
        self.row["images"] = self.row.get("images", 0) + passed_by_all
        passed.clear()

    def fine_tune(self):
        """Adds `fine_tuned` to the last row: evaluate_clients' measures after each of --fine-tune's
        numbers of epochs. Changes nothing if it is there, after --resume."""
        args, fed, row, done = self.args, self.federation, self.row, 0
        lr = args.fine_tune_lr or float(fed.eta(args.rounds))
        wanted = [(int(word), lr) for word in args.fine_tune.split(",")]
        if wanted == [(z["epochs"], z["lr"]) for z in row.get("fine_tuned", ())]:
            return
        self.count_images()
        if of := self.personal or self.models and self.clients_models():
            W = of(fed.everyone)
        else:
            W = self.global_model().expand(fed.K, -1)
        row["fine_tuned"], eta = [], torch.tensor(lr, device=fed.device)
        for order, (epochs, _) in enumerate(wanted):
            W, done = fed.fine_tuned(W, epochs - done, eta, order), epochs
            row["fine_tuned"].append({"epochs": epochs, "lr": lr, **fed.evaluate_clients(W)})
            if not is_finite(row["fine_tuned"][-1]["loss"]):
                say(f"note    {epochs} epochs of fine-tuning diverge for some clients, which then "
                    "have accuracy 0")
        fed.passed.clear()  # `images` are those of the rounds
        row["evaluation_seconds"] = self.elapsed()
        self.complete = False

    def elapsed(self):
        """Returns the seconds since the round began, or since its clock stopped."""
        return round(machine.now(self.federation.device) - self.clock - self.row["seconds"], 4)

    def sent(self, up, down):
        """Counts 4 bytes for each number sent: `up` to the server, `down` to clients."""
        for name, n in (("bytes_up", up), ("bytes_down", down)):
            if getattr(n, "ndim", 0):
                refuse(f"run.sent takes how many weights are sent, not a {type(n).__name__}; write "
                       "w.numel()")
            self.row[name] = (self.row[name] or 0) + 4 * (n.item() if hasattr(n, "item") else n)

    def stop_at_target(self, w):
        """Stops the round's clock. With --target it measures the global model w [d]; a round in
        which w has reached every target becomes the last."""
        row = self.row
        row["seconds"] = row["seconds"] or self.elapsed()
        if self.targets:
            top1 = self.federation.evaluate(w)["top1"]
            row["top1"] = self.federation.training.agree(top1)
            row["evaluation_seconds"] = self.elapsed()
            if row["top1"] >= max(self.targets):
                self.last = row["round"]

    def evaluates(self):
        """Stops the round's clock. Returns whether this round is evaluated: every --eval-every
        rounds, and the last."""
        row = self.row
        row["seconds"] = row["seconds"] or self.elapsed()
        self.guard.check_state()
        self.measured = state.marks(state.tensors_of(self.state))
        return row["round"] % self.args.eval_every == 0 or row["round"] == self.last

    def log(self, global_=None, personal=None, **more):
        """Records this round's measures: evaluate's, evaluate_clients', and others (tensors, Rows,
        numbers, texts). Prints the first two, and of others single numbers."""
        row = self.row
        if self.status != "unfinished":
            refuse("run.log: the record is written; with run.rounds(..., more_follows=True) the "
                   "run ends by run.finish()")
        for measures, has in ((global_, "top1"), (personal, "per_client")):
            if measures is not None and (not isinstance(measures, dict) or has not in measures):
                refuse("run.log(global, personal) takes what evaluate returns, then what "
                       "evaluate_clients returns; personal measures alone are "
                       "run.log(personal=...), others run.log(name=value)")
        if taken := [*more.keys() & {*EVERY_ROUND, *SHOWN, "per_client"}]:
            refuse(f"run.log({taken[0]}=...): the record has its own {taken[0]}; use another name")
        if odd := [name for name in more if "/" in name]:
            refuse(f"run.log: the name {odd[0]} has a /, which separates names in the record")
        more = tree_map(lambda z: z.all if isinstance(z, Rows) else z, more)
        global_, personal, more = tree_map(
            lambda z: z.tolist() if hasattr(z, "tolist") else z, (global_, personal, more))
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

    # The end of a run

    def diverge(self, what):
        say(f"round {self.row['round']}: diverged, {what} is not finite; "
            + self.go_on("--resume would go on"))
        self.count_images()
        if self.row in self.history:  # it was complete, and something more followed
            self.history.remove(self.row)
        self.failed = [{**{name: self.row[name] for name in (*ROW, "images")}, "diverged": True}]
        self.finish("diverged")
        raise SystemExit(3)

    def go_on(self, how="the same command with --resume goes on"):
        """Returns a sentence on what is on the disk."""
        if self.written:
            return f"{how} from round {self.written + 1}"
        return "no state was written yet"

    def finish(self, status="finished"):
        """Writes the record and the models, prints the results, and draws --plot's figures."""
        self.status = status
        machine.when_interrupted(lambda: "the run is over")
        self.bar.close()
        self.remarks = self.guard.remarks()  # on the loop, not on fine-tuning
        if status == "finished":  # what was logged after the loop
            self.per_client = self.row.pop("per_client", self.per_client)
            if self.args.fine_tune:
                self.fine_tune()
        if not self.complete:
            self.save()
        if status == "finished":
            self.save_models()
        self.at_the_end = state.marks(state.tensors_of(self.state))
        record = self.record()
        show(record, self)
        self.federation.training.end()
        if self.federation.training.processes > 1:
            atexit.register(dist.destroy_process_group)
        there = self.state_file.exists()
        if lost := [why for name, why in self.unwritten.items()
                    if name == "result.json" or name != "state.pt" and not there]:
            again = self.go_on("; mend that; the same command with --resume goes on") if there \
                else "; mend that, and run it again"
            refuse(f"{lost[0]}{again}", alone=True)
        say(f"record  {self.record_file}")
        if self.args.plot and status == "finished" and is_main_process():
            plots.plot(record, self.federation.data, self.federation.split, self.out, self.marks)

    # The record and the state

    def save(self):
        """Writes the state, unless it has diverged, and the record, by the first process."""
        start = time.monotonic()
        if is_main_process():
            if self.status != "diverged" and self.write("state.pt", self.put_state):
                self.written = len(self.history)
            text = records.text(self.content())
            self.write("result.json", lambda file: file.write(text.encode()))
        self.saved = time.monotonic()
        self.cost = self.saved - start

    def put_state(self, file):
        """Writes into an open file, or to a path, what --resume reads."""
        state.put(file, self.state, history=self.history, per_client=self.per_client,
                  changes=self.changes, environment=self.environment, **self.identity)

    def write(self, name, put):
        """Has put(file) write a file of the run's folder, whole or, if the disk is full, not at
        all. Returns whether it is there; says and remembers what went wrong."""
        path = self.out / name
        part = path.with_name(name + ".part")
        self.unwritten.pop(name, None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with open(part, "wb") as file:
                put(file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave an empty file
            os.replace(part, path)
            return True
        except (OSError, RuntimeError) as problem:  # torch.save raises RuntimeError instead
            causes = problem, problem.__context__
            why = next((z.strerror for z in causes if isinstance(z, OSError)), str(problem))
            self.unwritten[name] = f"{path} can't be written: {why}"
            say(f"disk    {self.unwritten[name]}")
            with contextlib.suppress(OSError):
                part.unlink()
            return False

    def global_model(self):
        """Returns the global model [d]."""
        return self.model(self.state) if callable(self.model) else getattr(self.state, self.model)

    def clients_models(self):
        """Returns the function that gives the own models [m, d] of clients S."""
        return (self.models if callable(self.models)
                else getattr(self.state, self.models).__getitem__)

    def save_models(self):
        """Writes state dicts: model.pt (global) and, with --save-clients, clients.pt."""
        fed, models = self.federation, {}
        if self.model:
            models["model.pt"] = self.global_model()
        if self.args.save_clients and not self.models:
            say(f"note    {self.algorithm} keeps no clients' models, so there is no clients.pt")
        elif self.args.save_clients:
            of = self.clients_models()
            # in the host's memory, since the device may lack the room
            models["clients.pt"] = torch.cat([of([k]).cpu() for k in fed.everyone])
        for name, w in models.items() if is_main_process() else ():
            self.write(name, functools.partial(torch.save, fed.net.state_dict(w)))

    def record(self):
        """Returns the record of a run that has ended, with a list of rows as "rounds"; docs/run.md
        says what each field means."""
        if self.status == "unfinished":
            remedy = ("call run.finish() after the loop" if getattr(self, "more_follows", False)
                      else "use --rounds or --target to end it sooner")
            refuse("the loop over run.rounds was left before its end (by `break`?), so there are "
                   f"no results; {remedy}")
        if odd := state.changed(self.at_the_end, state.tensors_of(self.state)):
            refuse(f"state.{odd[0]} has changed after the loop, and the models are written; with "
                   "run.rounds(..., more_follows=True) the run ends by run.finish()")
        return self.content()

    def content(self):
        """Returns what the record is now."""
        federation, history = self.federation, self.history
        net, split, data = federation.net, federation.split, federation.data
        final, best = {}, {}
        for part, key in (("global", "top1"), ("personal", "mean")):
            if seen := [{**row[part], "round": row["round"]} for row in history if part in row]:
                final[part], best[part] = dict(seen[-1]), max(seen, key=lambda row: row[key])
        if "personal" in final:
            final["personal"]["per_client"] = self.per_client
        last = next((row for row in reversed(history) if row.keys() - EVERY_ROUND), {})
        final |= {name: last[name] for name in last if name not in (*EVERY_ROUND, *SHOWN)}
        history = [*history, *self.failed]
        seconds = [row["seconds"] for row in history]
        sent = {name: [row[name] for row in history if row[name] is not None]
                for name in ("bytes_up", "bytes_down")}
        training, environment = federation.training, {**self.environment}
        if federation.device.type == "cuda":
            environment["way"] = training.used
        if training.gave_up:
            environment["slower"] = [f"{way}: {why}" for way, why in training.gave_up.items()]
        record = {
            "algorithm": self.algorithm, "command": self.command, "status": self.status,
            "diverged": self.status == "diverged", "args": self.identity["args"],
            "environment": environment,
            "data": {"name": data.name, "fingerprint": self.identity["data"]},
            "split": {"fingerprint": self.identity["split"], "clients": federation.K,
                      "sizes": [len(index) for index in split.train],
                      "classes": split.classes(data.labels)},
            "parameters": net.d, "rounds": history, "final": final, "best": best,
            **{name: sum(each) if each else None for name, each in sent.items()},
            "seconds_per_round": float(np.median(seconds)) if seconds else None,
            "peak_memory_mb": provenance.peak_memory(federation.device),
        }
        if all("images" in row for row in history):
            passed = sum(row["images"] for row in history)
            record["local_epochs"] = round(passed / sum(record["split"]["sizes"]), 4)
        if data.names:
            record["data"]["classes"] = data.names
        if net.batchnorms:
            record["batchnorm_layers"] = net.batchnorms
        if self.targets and any("top1" in row for row in history):
            record["rounds_to"] = {f"{z:g}": rounds_to(z, history) for z in self.targets}
        return record

    # The folder of a run: its lock, resuming, and what lies there from an earlier one

    @contextlib.contextmanager
    def open(self):
        """Begins or resumes the run. Refuses what it must before anything is printed."""
        first, lock = is_main_process(), filelock.FileLock(self.out / ".lock")
        try:
            if first:
                lock.acquire(blocking=False)
                (self.out / ".lock").write_text(f"process {os.getpid()}")
        except filelock.Timeout:
            who = "a process"
            with contextlib.suppress(OSError):  # Windows lets nobody read it
                who = (self.out / ".lock").read_text()
            refuse(f"another run ({who}) is writing to {self.out}; wait for it, end it, or use "
                   "another --out", alone=True)
        except (OSError, NotImplementedError):
            pass  # a file system without locks
        try:
            resumed = self.args.resume and self.resume()
            describe(self.federation, self.notes)
            if first and not resumed:
                self.put_aside()
            if self.args.tensorboard and first:
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(self.out, purge_step=len(self.history) + 1)
            self.bar = tqdm(total=self.args.rounds, initial=len(self.history), unit="round",
                            desc=self.algorithm, leave=False, dynamic_ncols=True,
                            disable=None if first else True)
            machine.when_interrupted(self.go_on)
            yield
        finally:  # also where the loop's body raises, since that closes the generator `rounds`
            if lock.is_locked:
                with contextlib.suppress(OSError):  # Windows removes no open file
                    os.remove(lock.lock_file)
                lock.release()

    def resume(self):
        """Restores a state on the disk. Returns whether there is one. Refuses another run's."""
        path, found = self.state_file, self.state_file.exists()
        try:
            finished = json.loads(self.record_file.read_text())["status"] == "finished"
        except (OSError, ValueError, KeyError, TypeError):  # no record, or a broken one
            finished = False
        if found != self.federation.training.agree(found):
            refuse(f"not all processes see {path}; --out must be on a disk that they share",
                   alone=True)
        if found:
            self.restore(state.read(path, self.state, self.identity, self.environment,
                                    self.fixed_rounds))
        elif finished:
            refuse(f"{self.record_file} is finished, and there is no {path.name} to resume; to run "
                   "it again, leave out --resume")
        else:
            self.note(f"resume  nothing to resume in {self.out}; starting at round 1")
        self.written = len(self.history)
        self.complete = finished and self.written == self.last
        if is_main_process() and found and not self.complete:
            for name in ("model.pt", "clients.pt"):  # of an earlier round
                (self.out / name).unlink(missing_ok=True)
        return found

    def restore(self, saved):
        """Takes over a state, the rows of its rounds and its environment."""
        state.restore(self.state, saved, self.federation.device)
        self.federation.passed.clear()  # before the loop: the first row has it
        self.history, self.per_client = saved["history"], saved["per_client"]
        done, past, now = len(self.history), saved["environment"], self.environment
        if self.targets and done and self.history[-1].get("top1", 0) >= max(self.targets):
            self.last = done
        other = f", by torch {past['torch']}" if past["torch"] != now["torch"] else ""
        self.note(f"resume  {self.state_file}: {done} of {self.args.rounds} rounds are done{other}")
        if done < self.last and any(past.get(name) != now[name] for name in now):
            past = {**past, "resumed": [*past.get("resumed", []), now]}
        self.environment = past

    def replaced(self):
        """Returns the files of an earlier run in the folder, which a new run would replace."""
        names = ("result.json", "state.pt", "model.pt", "clients.pt",
                 "events.out.tfevents.*[0-9]")
        aside = set(self.out.glob("*.previous.*"))
        return [path for name in names for path in sorted({*self.out.glob(name)} - aside)]

    def put_aside(self):
        """Renames the files that an earlier run left in the folder."""
        for path in self.replaced():
            previous = path.with_suffix(".previous" + path.suffix)
            os.replace(path, previous)
            say(f"kept    the earlier {path.name} in {self.out} as {previous.name}")


class NoGuard:
    """In the place of own_method.Guard, where nothing needs to be refused."""

    def __init__(self, fixed_rounds):
        self.fixed_rounds = fixed_rounds

    def nothing(self):
        return ()

    begin = next_round = begin_round = end_round = check_state = remarks = nothing


def guard(run, fixed_rounds):
    """Returns what watches a run: nothing where its file is ours, as committed, and its model and
    split are, too."""
    own = any(".py:" in name for name in (run.args.model, run.args.split))
    if provenance.whose(run.file) == "ours" and not own:
        return NoGuard(fixed_rounds)
    from .own_method import Guard  # nobody else needs its 500 lines

    return Guard(run, fixed_rounds)


# --------------------------------------------------------------------------------------------------
# What is printed


def describe(federation, notes):
    """Prints one line each on images, split, model and training, then the notes."""
    data, args, K, training = federation.data, federation.args, federation.K, federation.training
    train, _, test = ([len(index) for index in part] for part in federation.split)
    m, own = federation.m, args.client_test or splits.test_owner(data, args) is not None
    words = [f"data    {data.name}: {data.n_train} training and {len(data.central)} central test "
             f"images, {data.classes} classes, {'x'.join(map(str, data.images.shape[1:]))}"]
    if data.n_val:
        words.append(f"{data.n_val} validation images")
    if data.images.dtype != np.uint8:
        words.append(str(data.images.dtype))
    if data.owner is not None:
        words.append("with client_train (for --split natural)")
    say(", ".join(words))
    say(f"split   {args.split}: {K} client{'s' * (K > 1)}, {'all' if m == K else m} in a round, "
        f"training images {plots.spread(train)}, {'own' if own else 'central'} test images "
        f"{plots.spread(test)}, classes {plots.spread(federation.split.classes(data.labels))} "
        f"(least/mean/most), fingerprint {federation.split_fingerprint}")
    words = [f"model   {federation.net.name}: {federation.net.d:,} weights in {args.precision} on "
             f"{machine.device_name(federation.device)}"]
    if training.processes > 1:
        words.append(f"{training.processes} processes")
    if training.threads:
        words.append(f"{training.threads} thread{'s' * (training.threads > 1)}")
    say(", ".join(words))
    decay = f" --lr-decay {args.lr_decay:g}" * (args.lr_decay != 1)
    say(f"train   --transform {args.transform} --epochs {args.epochs} --batch-size "
        f"{args.batch_size} --lr {args.lr:g}{decay} --momentum {args.momentum:g}")
    for note in (*federation.notes, *notes):
        say(note)


def show(record, run):
    """Prints the table of a record."""
    minutes = [sum(row.get(name, 0) for row in record["rounds"]) / 60
               for name in ("seconds", "evaluation_seconds")]
    sent = "no run.sent has counted bytes" if record["bytes_up"] is None else (
        f"{record['bytes_up'] / 1e6:.1f} MB up, {record['bytes_down'] / 1e6:.1f} MB down")
    say(f"\n{run.algorithm} on {record['data']['name']}, {record['status']} after "
        f"{len(record['rounds'])} of {run.args.rounds} rounds: {minutes[0]:.1f} min of "
        f"training, {minutes[1]:.1f} of evaluation and fine-tuning, {sent}")
    for part in record["best"]:
        for when in ("final", "best"):
            measures = record[when][part]
            say(f"{when:<5}  round {measures['round']}  {in_words(part, measures)}")
    if len({row["bytes_up"] is None for row in record["rounds"]}) > 1:
        say("note    run.sent was called in some rounds only, so its sums leave out the others")
    if record.get("local_epochs") == 0:
        say("note    no client was trained by federation.train, so local_epochs is 0")
    for note in run.remarks:
        say(f"note    {note}")
    if record["status"] == "finished" and not record["final"]:
        say("note    no round has called run.log, so the record has no accuracies")
    if any(record["final"][part]["round"] < len(record["rounds"]) for part in record["best"]):
        say("note    `final` is not of the last round, in which the loop has not called run.log; "
            "ask run.evaluates() whether to call it")
    for tuned in record["final"].get("fine_tuned", ()):
        say(f"tuned  {tuned['epochs']:>3} epochs more  {in_words('personal', tuned)}")
    for target, t in record.get("rounds_to", {}).items():
        say(f"target  {target}: " + (f"after {t:.1f} rounds" if t else "not reached"))


def in_words(part, measures, names=None):
    """Returns the measures called `names`, or all of them, as text."""
    shown = {name: z for name, z in measures.items() if isinstance(z, float)}
    return part + "".join(f" {name} {shown[name]:.4f}" for name in names or shown if name in shown)


def rounds_to(target, history):
    """Returns after how many rounds the best accuracy so far reaches the target, interpolated
    linearly, or None."""
    measured = [row for row in history if "top1" in row]
    t = [row["round"] for row in measured]
    best = np.maximum.accumulate([row["top1"] for row in measured])
    i = int(np.searchsorted(best, target))  # the first that is at least the target
    near = slice(max(i - 1, 0), i + 1)
    return float(np.interp(target, best[near], t[near])) if i < len(t) else None


def without_clients(measures):
    """Returns evaluate_clients' measures without the clients' accuracies."""
    return {name: value for name, value in measures.items() if name != "per_client"}
