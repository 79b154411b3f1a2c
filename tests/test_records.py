"""The form of records on the disk, and whether one has the arguments that are wanted."""

import json
import math

import pytest

from conftest import refused
from fl import records

ARGS = {"seed": 0, "lr": 0.1, "split": "iid", "alpha": 1.0}


def record(rounds, **more):
    return {"algorithm": "mine", "status": "finished", "args": ARGS, "rounds": rounds,
            "environment": {"sources": {}}, "final": {}, **more}


def on_disk(tmp_path, record):
    """Returns what is written, and what is read again."""
    (tmp_path / "result.json").write_text(records.text(record))
    return (json.loads((tmp_path / "result.json").read_text()),
            records.read(tmp_path / "result.json"))


def test_rows_become_columns_and_rows_again(tmp_path):
    """Rounds 2 and 4 of four are measured; in round 4 something new comes, and a list is final."""
    rows = [{"round": t, "seconds": t + 0.25, "bytes_up": 8, "bytes_down": t} for t in range(1, 5)]
    rows[1] |= {"evaluation_seconds": 1.5, "global": {"top1": 0.5, "loss": 2.0},
                "own": {"a": {"b": 3}}, "alpha": 0.75, "phase": "final"}
    rows[3] |= {"evaluation_seconds": 2.5, "global": {"top1": 0.25, "loss": 1.0},
                "users": {"T": [5, 7]}, "text": "yes", "list": [1, {"x": 2.0}], "phase": "last"}
    whole = record(rows, final={"users": {"T": [5, 7]}, "personal": {"per_client": [1.0]},
                                "phase": "last"})
    written, read = on_disk(tmp_path, whole)
    assert written["rounds"] == {"seconds": [1.25, 2.25, 3.25, 4.25], "bytes_up": 8,
                                 "bytes_down": [1, 2, 3, 4]}
    assert written["evaluations"] == {
        "round": [2, 4], "global/top1": [0.5, 0.25], "global/loss": [2.0, 1.0],
        "own/a/b": [3, None], "alpha": [0.75, None], "evaluation_seconds": [1.5, 2.5],
        "users/T": [None, "final"], "text": [None, "yes"], "list": [None, [1, {"x": 2.0}]],
        "phase": ["final", "last"]}
    assert read == whole


def test_what_every_round_measures_is_in_the_table_of_the_rounds(tmp_path):
    rows = [{"round": t, "seconds": 1.0, "bytes_up": 0, "bytes_down": 0, "top1": t / 4,
             "evaluation_seconds": 2.0} for t in (1, 2)]
    rows[1]["global"] = {"top1": 0.5}
    written, read = on_disk(tmp_path, record(rows))
    assert written["rounds"]["top1"] == [0.25, 0.5]
    assert written["evaluations"] == {"round": [2], "global/top1": [0.5]}
    assert read["rounds"] == rows


def test_which_digits_are_kept(tmp_path):
    """Seconds to .01, measures to eight digits, and all in `final`; no number is a null."""
    third = 1 / 3
    rows = [{"round": 1, "seconds": third, "bytes_up": 1, "bytes_down": 1,
             "global": {"loss": third, "ece": math.nan}, "all": [third, math.inf]}]
    written, read = on_disk(tmp_path, record(rows, final={"global": {"loss": third}}))
    assert written["rounds"]["seconds"] == [0.33]
    assert written["evaluations"] == {"round": [1], "global/loss": [0.33333333],
                                      "global/ece": [None], "all": [[0.33333333, None]]}
    assert read["final"]["global"]["loss"] == third
    assert read["rounds"][0]["global"] == {"loss": 0.33333333}


def test_records_without_rounds_of_diverged_runs_and_in_the_old_form(tmp_path):
    assert on_disk(tmp_path, record([]))[1]["rounds"] == []
    row = {"round": 1, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "diverged": True}
    written, read = on_disk(tmp_path, record([row], status="diverged"))
    assert "diverged" not in written["rounds"] and read["rounds"] == [row]
    old = record([{"round": 1, "seconds": 0.123, "bytes_up": 1, "bytes_down": 1}])
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert records.read(tmp_path / "old.json") == old


@pytest.mark.parametrize("change", [
    lambda r: r.pop("rounds"), lambda r: r.pop("evaluations"), lambda r: r.pop("args"),
    lambda r: r["rounds"].pop("seconds"), lambda r: r["rounds"]["seconds"].pop(),
    lambda r: r["evaluations"].update(round=[7]), lambda r: r.update(rounds=3),
])
def test_a_broken_record_is_refused(tmp_path, capsys, change):
    rows = [{"round": t, "seconds": 1.0, "bytes_up": t, "bytes_down": 1, "x": 2} for t in (1, 2)]
    broken = json.loads(records.text(record(rows)))
    change(broken)
    (tmp_path / "result.json").write_text(json.dumps(broken))
    refused(capsys, "result.json can't be read as a record", records.read, tmp_path / "result.json")


def test_where_a_runs_record_is(tmp_path):
    folder = tmp_path / "0.5"
    assert records.at(folder) == folder / "result.json"
    (tmp_path / "0.5.json").write_text("")
    assert records.at(folder) == tmp_path / "0.5.json"
    folder.mkdir()
    (folder / "result.json").write_text("")
    assert records.at(folder) == folder / "result.json"


@pytest.mark.parametrize("now, names", [
    (ARGS, []), ({**ARGS, "lr": 0.2, "seed": 1}, ["seed", "lr"]),
    ({**ARGS, "alpha": 2.0}, []),  # which iid does not use
    ({**ARGS, "split": "fedma", "alpha": 2.0}, ["split", "alpha"]),
    ({**ARGS, "new": False, "other": None}, []), ({**ARGS, "new": True}, ["new"]),
    ({**ARGS, "out": "x", "device": "cuda", "parallel": 3}, []),  # these change no result
    ({name: z for name, z in ARGS.items() if name != "lr"}, []),  # a flag that has gone
])
def test_in_which_flags_a_record_differs(now, names):
    assert records.unlike(record([]), now) == names
    assert records.unlike(record([]), now, but=("lr",)) == [z for z in names if z != "lr"]
