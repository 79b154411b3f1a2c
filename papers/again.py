"""`python -m papers --again RECORD`: runs a record's command on today's code, and prints the record
and the new one side by side."""

import itertools
import pathlib
import shlex
import subprocess
import sys
import time

import common
from fl import records

from . import runs

TOLD = "torch", "device", "commit", "processes", "way"  # of `environment`, where they differ


def words_of(record, path):
    """Returns the words of the record's command, without --out. Refuses a record without one, and a
    command that today's files read differently."""
    if not record.get("command"):
        common.refuse(f"{path} has no `command`, so it can't be run again")
    words = shlex.split(record["command"])
    while "--out" in words:
        i = words.index("--out")
        del words[i : i + 2]
    words = [word for word in words if not word.startswith("--out=")]
    if (runs.HERE / words[0]).exists():
        now = runs.parsed(words)
        if other := records.unlike(record, now, but=("precision",)):
            name = other[0]
            common.refuse(f"{path} was made with {name} {record['args'].get(name)}; its command "
                          f"now means {now[name]}: python {shlex.join(words)}")
    return words


def train(words, out, rounds):
    """Runs the command in the folder `out`, until its record has `rounds` rounds, if given. Returns
    the exit code, 0 if it was stopped there."""
    file, record = runs.HERE / words[0], out / "result.json"
    start = [file if file.exists() else words[0]]
    if words[0].startswith("papers/"):  # else `import psinet` would mean papers/psinet.py
        start = ["-m", words[0].removesuffix(".py").replace("/", ".")]
    child = subprocess.Popen([sys.executable, *start, *words[1:], "--out", out])
    try:
        while child.poll() is None:
            time.sleep(0.2)
            if rounds and record.exists() and len(records.read(record)["rounds"]) >= rounds:
                return 0
    finally:
        child.terminate()
        child.wait()
    return child.returncode


def side_by_side(title, then, now):
    """Prints the numbers that two dicts share, and by how much they differ."""
    common.say(f"\n{title:<28}{'record':>14}{'again':>14}")
    for name in then:
        a, b = then[name], now.get(name)
        if isinstance(a, int | float) and isinstance(b, int | float):
            how = "equal" if a == b else f"{b - a:+.3g}"
            common.say(f"{name:<28}{a:>14.8g}{b:>14.8g}  {how}")


def compare(then, now):
    """Prints two records side by side: the last round that both measured, the results if both runs
    have ended, the first difference, and what differs in the environment."""
    a, b = records.measures(then), records.measures(now)
    both = {t: {*a[t]} & {*b[t]} for t in a if t in b}
    measured = [t for t in both if both[t] - {*records.EVERY_ROUND[:4]}]
    if measured:
        t = measured[-1]
        side_by_side(f"round {t}", {name: z for name, z in a[t].items() if name in both[t]}, b[t])
    if {then["status"], now["status"]} <= {"finished", "diverged"}:
        for part in ("final", "best", "rounds_to"):
            side_by_side(part, records.flat(then.get(part, {})), records.flat(now.get(part, {})))
    unequal = [f"the first difference is round {t}'s {name}" for t in both for name in a[t]
               if name in both[t] and a[t][name] != b[t][name]]
    common.say(f"\n{len(both)} rounds are in both records, {len(measured)} of them measured: "
               + [*unequal, "all equal to the digit"][0])
    told = [(f"fingerprint of the {name}", then[name]["fingerprint"], now[name]["fingerprint"])
            for name in ("data", "split")]
    told += [(name, then["environment"].get(name), now["environment"].get(name)) for name in TOLD]
    for name, old, new in told:
        if old != new:
            common.say(f"{name}: {old} then, {new} now")


def repeat(path, rounds=None):
    """Runs the command of the record `path` in runs/again/ and compares. rounds: how many of its
    rounds; None: all. Returns an exit code."""
    then = records.read(path)
    words = words_of(then, path)
    name = path.resolve().parent if path.name == "result.json" else path.resolve().with_suffix("")
    inside = runs.RESULTS in name.parents
    name = name.relative_to(runs.RESULTS) if inside else name.name
    out = free = pathlib.Path("runs", "again", name).absolute()
    for i in itertools.count(2):
        if not free.exists():
            break
        free = out.with_name(f"{out.name}-{i}")
    common.say(f"again   python {shlex.join(words)} --out {free}")
    code = train(words, free, rounds)
    if code not in (0, 3):
        return code
    compare(then, records.read(free / "result.json"))
    return 0
