"""`python -m papers --again RECORD`: runs a record's command on today's code, and prints the record
and the new one side by side."""

import pathlib
import shlex
import subprocess
import sys
import time

import common
from fl import records

from . import runs


def words_of(record, path):
    """Returns the words of the record's command. Refuses a record without one, and a command that
    today's files read differently."""
    if not record.get("command"):
        common.refuse(f"{path} has no `command`, so it can't be run again")
    words = shlex.split(record["command"])
    if (runs.HERE / words[0]).exists():
        now = runs.parsed(words)
        if other := records.unlike(record, now, but=("precision",)):
            name = other[0]
            common.refuse(f"{path} was made with {name} {record['args'].get(name)}; its command "
                          f"now means {now[name]}: python {shlex.join(words)}")
    return words


def train(words, out, rounds):
    """Runs the command with this --out, which wins over an earlier one, until its record has
    `rounds` rounds, if given. Returns the exit code, 0 if it was stopped there."""
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
    both = {t: [name for name in a[t] if name in b[t]] for t in a if t in b}
    measured = [t for t in both if {*both[t]} - {*records.EVERY_ROUND[:4]}]
    for t in measured[-1:]:
        side_by_side(f"round {t}", {name: a[t][name] for name in both[t]}, b[t])
    if {then["status"], now["status"]} <= {"finished", "diverged"}:
        for part in ("final", "best", "rounds_to"):
            side_by_side(part, records.flat(then.get(part, {})), records.flat(now.get(part, {})))
    unequal = [f"the first difference is round {t}'s {name}" for t in both for name in both[t]
               if a[t][name] != b[t][name]]
    common.say(f"\n{len(both)} rounds are in both records, {len(measured)} of them measured: "
               + (unequal[0] if unequal else "all equal to the digit"))
    for part in ("data", "split"):
        told(f"fingerprint of the {part}", then[part]["fingerprint"], now[part]["fingerprint"])
    for name in ("torch", "device", "commit", "processes", "way"):
        told(name, then["environment"].get(name), now["environment"].get(name))


def told(name, then, now):
    if then != now:
        common.say(f"{name}: {then} then, {now} now")


def repeat(path, rounds=None):
    """Runs the command of the record `path` in runs/again/ and compares. rounds: how many of its
    rounds; None: all. Returns an exit code."""
    then = records.read(path)
    words = words_of(then, path)
    name = path.resolve().parent if path.name == "result.json" else path.resolve().with_suffix("")
    inside = runs.RESULTS in name.parents
    name = name.relative_to(runs.RESULTS if inside else name.parent)
    out, i = pathlib.Path("runs", "again", name).absolute(), 1
    while out.exists():
        i += 1
        out = out.with_name(f"{name.name}-{i}")
    common.say(f"again   python {shlex.join(words)} --out {out}")
    code = train(words, out, rounds)
    if code not in (0, 3):
        return code
    compare(then, records.read(out / "result.json"))
    return 0
