"""What compare.py trains: the methods, the settings that they share, and their own ones. What is
wrong in the command line is refused here."""

import argparse
import contextlib
import io
import json
import pathlib
import re
import shlex
from typing import NamedTuple

import baselines
import common
from fl.machine import first_line
from fl.records import FREE

HERE = pathlib.Path(__file__).resolve().parent.parent

# What all methods share unless the command line says otherwise. All other flags of the groups
# "data" and "training" of `python fedavg.py --help` are shared, too, with common.py's defaults.
SHARED = dict(dataset="shapes", split="shards", clients=20, per_client=4, client_val=0.1,
              client_test=0.2, model="cnn", transform="normalize", fraction=0.5, rounds=30,
              epochs=1, batch_size=10, lr=0.02, momentum=0.9)
BY_DATASET = {"shapes": dict(lr_decay=0.95)}  # for 30 rounds; after 200 no rate would be left

# A file, and the flags that make the method. baselines.py's FedAvg has momentum.
METHODS = {
    "fedavg": "baselines.py --method fedavg", "fedavgm": "fedavgm.py",
    "superfed-mm": "superfed.py --mix model", "superfed-lm": "superfed.py --mix layer",
    "psinet": "psinet.py", "fedslr": "fedslr.py", "persfl": "persfl.py",
    **{name: f"baselines.py --method {name}" for name in baselines.METHODS},
    "fedma": "baselines.py --method fedma --common-start",  # from the w_0 of all others
}


def plain(shared):
    """Returns SGD's settings without momentum. If other methods have momentum, the rate is 5/2 of
    theirs, our choice: momentum .9 lets a step grow to 10 eta."""
    return {"momentum": 0, "lr": round(shared.lr * (5 / 2 if shared.momentum else 1), 6)}


def everybody(shared):
    """Returns settings with all clients in fewer rounds, which train as many clients in all."""
    rounds = max(1, round(shared.rounds * shared.fraction))
    return {"fraction": 1, "rounds": rounds,
            "eval_every": max(1, int(shared.eval_every * shared.fraction))}


# A method's own values of settings, and why it has them.
NO_MOMENTUM = "the paper's clients have no momentum"
OWN = {
    "fedslr": (plain, "the authors' clients have no momentum"),
    "scaffold": (plain, NO_MOMENTUM),
    "per-fedavg": (plain, NO_MOMENTUM),
    "centralised": (lambda shared: plain(shared) | everybody(shared),
                    "with the others' momentum and rate it learns almost nothing; it has all "
                    "clients' images in every round"),
    "fedavgm": (lambda shared: plain(shared) | {"beta": 0.9},
                "momentum is at the server, not at the clients"),
    "pfedme": (lambda shared: plain(shared) | {"lr": 0.067, "theta_lr": plain(shared)["lr"]},
               f"{NO_MOMENTUM}; lr = 1/lambda, so a step of round 1 sets w_k to "
               "theta_k; theta_lr is SGD's rate"),
    "fedma": (lambda shared: {"rounds": max(1, round(shared.rounds / 2))},
              "in a round it trains once for each layer (longer for the last), where others train "
              "once"),
    "persfl": (lambda shared: plain(shared) | everybody(shared) | {"distill_epochs": 2},
               "no momentum, as in the file; all clients take part in every round; two epochs of "
               "distillation, fewer than in the file, follow the last round"),
}
COMPUTED = {"pfedme_lambda": "lr"}  # if --set gives the first, the method computes the second
FREED = "lr", "lr_decay", "momentum", "weight_decay", "epochs"  # shared, but --set may change it
OURS = ("seed", "out", "resume", "plot")  # what this program sets itself


class Method(NamedTuple):
    name: str
    method: str  # one of METHODS, or a file as it was given
    file: pathlib.Path
    argv: list  # its flags but --seed and --out
    args: dict  # all arguments, parsed
    own: set  # the names of the settings that OWN or --set gives it
    why: str  # OWN's reason


def flags(settings):
    """{"batch_size": 20, "lambda_": .1, "augment_once": True, "limit": None, "target": []} ->
    ["--batch-size=20", "--lambda=0.1", "--augment-once"]"""
    given = {name: value for name, value in settings.items()
             if value is not None and value is not False and value != []}
    return [flag(name) if value is True else f"{flag(name)}={value}"
            for name, value in given.items()]


def flag(name):
    return f"--{name.strip('_').replace('_', '-')}"


def share(argv):
    """Returns the settings that all methods share."""
    parser = common.parser("", **SHARED, eval_every=None)
    if unknown := parser.parse_known_args(argv)[1]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; a method's own parameter is "
                     "--set NAME.PARAMETER=VALUE")
    shared = common.parse(parser, BY_DATASET, argv)
    if shared.eval_every is None:
        shared.eval_every = tenth(shared.rounds)
    return shared


def tenth(rounds):
    """Returns the default of --eval-every, which puts at least ten points on a curve."""
    return max(1, rounds // 10)


def plan(methods, sets, shared, option="--set"):
    """Returns the Methods of --methods with the words of --set, or of one point of --tune."""
    sets, found = words_of(sets, option), {}
    for name, method in named(methods):
        if name in found or name in METHODS and name != method:
            common.refuse(f"--methods: the name {name} is taken; give {method} another one: "
                          f"NAME={method}")
        found[name] = made(name, method, sets.get(name, {}), shared, option)
    if not found:
        common.refuse("--methods is empty")
    for name, words in sets.items():
        if name not in found:
            word = next(iter(words.values()))
            common.refuse(f"--set {name}.{word[2:]}: --methods has no {name}; its names are "
                          f"{', '.join(found)}")
    return list(found.values())


def named(methods):
    """Yields (name, method) of --methods: fedprox, strong=fedprox, path/to/mine.py, ..."""
    for word in filter(None, map(str.strip, methods.split(","))):
        if given := re.fullmatch(r"([^\W_][\w-]*)=(.+)", word):  # NAME is a folder, too
            yield given.groups()
        elif word == "all":
            yield from ((method, method) for method in METHODS)
        else:
            yield word if word in METHODS else name_of(word), word


def name_of(file):
    """Returns the name of a method of somebody's file, as NAME=METHOD takes it."""
    return pathlib.Path(file).stem.replace(".", "_").lstrip("_")


def words_of(sets, option):
    """Returns {name: {parameter: its flag}} of words NAME.PARAMETER=VALUE."""
    found = {}
    for word in sets:
        if not (given := re.fullmatch(r"([^.=]+)\.([^.=]+)(=.*)?", word, re.S)):
            common.refuse(f"{option} {word}: say NAME.PARAMETER=VALUE")
        name, parameter, value = given.groups("")
        words, parameter = found.setdefault(name, {}), parameter.replace("-", "_")
        if parameter in words:
            common.refuse(f"{option} {word}: it is set twice")
        words[parameter] = flag(parameter) + value
    return found


def made(name, method, mine, shared, option):
    """Returns a Method. mine: words_of --set, of this name."""
    file, words = file_of(method)
    no_part = (*OURS, *common.unused(shared.split))
    all_share = {key: value for key, value in vars(shared).items() if key not in no_part}
    own, why = OWN.get(method, (lambda _: {}, ""))
    wanted = all_share | own(shared)
    if shared.eval_every == tenth(shared.rounds):
        wanted["eval_every"] = tenth(wanted["rounds"])
    what, fixed = f"--methods: {name}", {*OURS, *all_share} - {*FREED}
    for key, word in mine.items():
        if flag(key) in words or key in fixed:
            common.refuse(f"{option} {name}.{word[2:]}: {flag(key)} is no parameter of {method} "
                          "alone: all methods share it, or it makes the method")
    for key in (*mine, *(COMPUTED[key] for key in mine if key in COMPUTED)):
        wanted.pop(key, None)
    if mine:
        what += f", {option} {name}.{', '.join(word[2:] for word in mine.values())}"
    argv = [*words, *flags(wanted), *mine.values()]
    parsed = parse(file, argv, what)
    for key, value in wanted.items():
        if key in all_share and key not in FREE and parsed.get(key) != value:
            common.refuse(f"--methods: {file} makes {parsed.get(key)} of {flag(key)} {value}, "
                          f"which all methods share; to give it to all: {flag(key)} "
                          f"{parsed.get(key)}")
    if parsed.get("target"):
        common.refuse(f"--methods: {file} stops at an accuracy (target={parsed['target']}), "
                      f"others don't; use --set {name}.target without a value")
    return Method(name, method, file, argv, parsed, {*own(shared), *mine}, why)


def file_of(method):
    """Returns a method's file, and the flags that make the method."""
    if method in METHODS:
        file, *words = METHODS[method].split()
        return HERE / file, words
    if not method.endswith(".py"):
        common.refuse(f"--methods: there is no method {method}; use a file.py, or one of "
                      f"{', '.join(METHODS)}")
    return pathlib.Path(method).resolve(), []


def parse(file, argv, what):
    """Returns what the arguments(argv) of a method's file makes of its flags, as a record has it;
    its refusal becomes ours."""
    module, result, why = common.load_file(file), None, ""
    if not all(callable(getattr(module, name, None)) for name in ("arguments", "main")):
        common.refuse(f"--methods: {file} must have arguments(argv) and main(argv); see "
                      "docs/extend.md")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            result = module.arguments(argv)
        except SystemExit as end:
            own = end.code if isinstance(end.code, str) else "its arguments(argv) ends"
            why = said.getvalue().partition("error: ")[2].strip() or own
        except Exception as problem:  # whatever the file does
            why = f"its arguments(argv) fails: {type(problem).__name__}: {first_line(problem)}"
    if not why and not isinstance(result, argparse.Namespace):
        why = "its arguments(argv) does not return what common.parse returns; see docs/extend.md"
    if why:
        why = why.replace("(see --help)", f"(see {shell([str(file), '--help'])})")
        common.refuse(f"{what}: {why}")
    return json.loads(json.dumps(vars(result), default=str))


def shell(argv):
    """Returns argv for a shell. A file elsewhere is told where common.py is."""
    command = f"python {shlex.join(argv)}"
    ours = pathlib.Path(argv[0]).resolve().parent == HERE
    return command if ours else f"PYTHONPATH={shlex.quote(str(HERE))} {command}"
