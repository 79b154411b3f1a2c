"""Trains the runs of a comparison that are missing, each in a process of its own, and reads their
records."""

import hashlib
import pathlib
import time
from typing import NamedTuple

import common
from fl import records
from fl.child import REPEATS, Child
from fl.provenance import changes

from .planning import HERE, METHODS, Method, flag, flags, shell

DONE = "finished", "diverged"  # the status of a record that counts


class Job(NamedTuple):
    label: str
    method: Method
    folder: pathlib.Path


def job(method, seed, split_seed, folder, label):
    """Returns the Job of a method with a seed on a split."""
    more = {"split_seed": split_seed, "seed": seed}
    return Job(label, method._replace(argv=[*method.argv, *flags(more)], args=method.args | more),
               folder)


def train_all(wanted, jobs, shared):
    """Trains those of the Jobs that are missing, `jobs` at a time. Returns a record for each."""
    prints, owned, todo = {}, {}, []
    for run in wanted:
        if (at := run.method.args["split_seed"]) not in prints:
            # downloads, or refuses, once, before several runs do
            data = common.images_for(shared, common.stream(at, "split", 1))
            split = common.split_clients(data, shared, common.stream(at, "split"))
            prints[at] = data.fingerprint(), split.fingerprint()
            owned[at] = tuple(index.tobytes() for index in split.owned(data.n_train))
        if argv := missing(run, prints[at]):
            todo.append((run, argv))
    if len({*owned.values()}) < len(owned):
        common.say("note    --split gives each client the same images for several --split-seeds: "
                   "only what is held out differs")
    one_thread = jobs > 1 and shared.device == "cpu"  # on a GPU clients train at once
    children, begun = [], set()  # [(Child, its Job, argv)], methods
    try:
        while todo or children:
            while todo and len(children) < jobs:
                run, argv = todo.pop(0)
                more = {"OMP_NUM_THREADS": "1"} if one_thread else {}
                if (name := run.method.name) in begun:
                    more[REPEATS] = ""  # its first run does
                begun.add(name)
                child = Child([*argv, *["--parallel=1"] * one_thread], **more)
                children.append((child, run, argv))
            time.sleep(0.02)
            for child, run, argv in [z for z in children if z[0].ended()]:
                children.remove((child, run, argv))
                found = trained(run, argv, child, prints[run.method.args["split_seed"]])
                common.say(f"{run.label}: {'diverged' if found['diverged'] else 'done'}, "
                           f"{len(todo) + len(children)} to go")
    finally:
        for child, *_ in children:
            child.stop()
    for run in wanted:
        if names := changed(run.method, record(run), done=True):
            common.refuse(f"{run.label}: {', '.join(names)} changed meanwhile; repeat the command")
    return [record(run) for run in wanted]


def missing(run, prints):
    """Returns the argv of a Job that is to be trained, or to go on; None if it is done. Refuses a
    record of other images or another split. prints: the fingerprints of both."""
    found, start = record(run), [str(run.method.file), *run.method.argv, f"--out={run.folder}"]
    if not found:
        return [*start, "--resume"]
    tuned = ",".join(str(z["epochs"]) for z in found["final"].get("fine_tuned", ()))
    more = (found["args"]["rounds"] < run.method.args["rounds"]
            or run.method.args["fine_tune"] not in (None, tuned))
    done = found["status"] == "diverged" or found["status"] == "finished" and not more
    if names := changed(run.method, found, done):
        common.say(f"{run.label}: {', '.join(names)} changed; trained anew, the record becomes "
                   "result.previous.json")
        return start
    if prints != prints_of(found):
        what = "other images" if prints[0] != prints_of(found)[0] else "another split"
        common.refuse(f"{run.folder} has a record of {what} than {run.method.args['dataset']} has "
                      "now; use another --out")
    return None if done else [*start, "--resume"]


def record(run):
    """Returns a Job's record, or None. Refuses one with other settings."""
    path, args = records.at(run.folder), run.method.args
    if not path.exists():
        return None
    found = records.read(path)
    then, file = found["args"], next(iter(found["environment"]["sources"]))
    other = "use another NAME, or another --out"
    if file != run.method.file.name:  # a user's file may call one of ours
        if not (HERE / file).exists():
            common.refuse(f"{run.folder} has a record of {file}, now it is {run.method.file.name}; "
                          f"{other}")
        args = {**args, **{name: None for name in then if name not in args and then[name]}}
    for name in records.unlike(found, args):
        was, now = then.get(name), args[name]
        if name != "rounds" or was > now:  # with more rounds it goes on
            common.refuse(f"{run.folder} has a record with {flag(name)} {was}, now it is {now}; "
                          f"{other}")
    return found


def changed(method, record, done):
    """Returns the names of the files that have changed since a record was made: a user's files, and
    this repository's that somebody has edited, or, unless it is done, any source file."""
    own = [pathlib.Path(name.rpartition(":")[0])
           for name in (method.args["model"], method.args["split"]) if ".py:" in name]
    if method.method not in METHODS:
        own.append(method.file)
    folders = {path.resolve().parent for path in own}  # whence they import
    if method.args.get("init"):
        own.append(pathlib.Path(method.args["init"]))
    found, sources = [], record["environment"]["sources"]
    # with a + if a file was edited, or lies elsewhere
    made = record["environment"].get("commit") or ""
    if not done or made.endswith("+") and not own:
        folders.add(HERE)
    edited = changes(HERE / name for name in sources if (HERE / name).exists())
    for name, digest in sources.items():
        files = [path for path in own if path.name == name]
        files = files or [folder / name for folder in folders if (folder / name).exists()]
        files = files or [HERE / name] * (HERE / name in edited)
        if files and digest not in [hashlib.sha256(file.read_bytes()).hexdigest()
                                   for file in files]:
            found.append(name)
    return found


def trained(run, argv, child, prints):
    """Returns the record of a Job whose Child has ended. Refuses what is no result."""
    (code, said), file = child.result(), run.method.file
    if code not in (0, 3):  # 3: diverged, which is a result
        command = "" if code == 2 else f" ({shell(argv)})"
        common.refuse(f"{run.label}: {said}{command}")
    if records.at(run.folder).exists():
        found = records.read(records.at(run.folder))
        odd = records.unlike(found, run.method.args)
        if odd and file.name == next(iter(found["environment"]["sources"])):
            common.refuse(f"{run.label}: {file} changes {flag(odd[0])} after its arguments(argv), "
                          f"to {found['args'].get(odd[0])}; change it there")
    found = record(run)
    if not found or found["status"] not in DONE:
        common.refuse(f"{run.label}: {file} has not trained all rounds; does it loop over "
                      'run.rounds without `break`, and end with  if __name__ == "__main__": main()')
    rounds = len(found["rounds"])
    for part in found["final"].keys() & {"global", "personal"} if code == 0 else ():
        if (last := found["final"][part]["round"]) < rounds:
            common.refuse(f"{run.label}: {file} has last called run.log in round {last} of "
                          f"{rounds}; ask run.evaluates() whether to call it")
    if prints != prints_of(found):
        common.refuse(f"{run.label}: {file} has not had the images and the split that all share, "
                      "so it can't be compared (a function of --split draws from rng alone)")
    return found


def prints_of(record):
    """Returns the fingerprints of a record's images and split."""
    return record["data"]["fingerprint"], record["split"]["fingerprint"]
