"""The GPU's ways through whole runs, on a GPU that is pretended (pretend.py), with a function call
in place of each CUDA graph; and what happens when something goes wrong there."""

import json
import sys
from types import SimpleNamespace

import bench
import gpu_check
import memory
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import baselines
import common
import fedavg
import fl.training
import pretend
import superfed
from conftest import QUICK, eager, federation, killed, refused, run

SMALL = [*gpu_check.FEW[2:], "--device", "cpu"]
FED = [*QUICK, "--split", "iid", "--model", "mnistnet"]


@pytest.mark.parametrize("name", gpu_check.ALGORITHMS)
def test_the_gpus_ways_give_what_the_loop_gives(name):
    """Each step is captured, and what is repeated is what was captured."""
    module, *flags = [*gpu_check.ALGORITHMS[name], "--dataset", "shapes", "--rounds", "2", *SMALL]
    flags += ["--model", "mnistnet"] if module == "baselines" else []  # others have convolutions
    loop, wanted, _, w_0 = gpu_check.run(module, flags)
    for way in ("together", "graphs"):
        with pretend.gpu(way=way):
            record, found, federation, _ = gpu_check.run(module, flags)
        assert not federation.failed
        assert federation.used == ("graphs" if "unequal" in name else way)
        # with BatchNorm one rounding decides a ReLU otherwise
        near = {"fedavg, bf16": 0.3, "psinet, BatchNorm": 0.03}.get(name, 1e-3)
        assert gpu_check.difference(wanted, found, w_0) < near
        assert all(record[key] == loop[key] for key in ("split", "bytes_up", "bytes_down"))


def test_a_run_is_resumed_on_it(tmp_path):
    """With what clients keep on the device, and in the host's memory."""
    argv = [*FED, "--mix", "layer", "--start", "0", "--rounds", "3", "--eval-every", "1"]
    with pretend.gpu():
        _, near = run(superfed, argv, tmp_path / "near")
    with pretend.gpu(room=0):
        killed(superfed, argv, tmp_path / "far", lambda t, _: t == 2)
        _, far = run(superfed, [*argv, "--resume"], tmp_path / "far")
    assert all(torch.equal(near[name], far[name]) for name in ("w_f", "w_l"))


def test_a_hundred_clients_take_no_more_of_its_memory_than_twenty(tmp_path):
    """If what they keep lies in the host's memory: here a model each."""
    peaks = {}  # in models of 308,310 weights
    for K, near in ((20, False), (100, False), (100, True)):
        argv = [*FED, "--method", "local", "--clients", K, "--fraction", 4 / K, "--rounds", 1,
                "--batch-size", 1, "--limit", 5 * K]
        gb = memory.on_the_gpu(baselines, argv, tmp_path / f"{K}-{near}", near)
        peaks[K, near] = (gb * 1e9 - 5 * K * 32 * 32 * 3) / (4 * 308_310)  # less the images
    assert peaks[100, False] < peaks[20, False] + 1 < peaks[100, True] - 90


# What goes wrong


PROBLEMS = {
    "capture": torch.AcceleratorError("CUDA error: operation not permitted when stream captures"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."),
    "wrong": None,
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("ways", [1, 2])
def test_a_way_that_fails_is_given_up_with_one_line(ways, name, tmp_path, capsys):
    """The run ends as one by the next way, says so in a line, and its record does. ways: how many
    fail."""
    _, want = run(fedavg, FED, tmp_path / "loop")
    calls = []

    def capture(function, device):
        calls.append(1)
        if len(calls) > ways:
            return eager(function, device)
        if PROBLEMS[name]:
            raise PROBLEMS[name]
        return lambda: tree_map(lambda z: z.roll(1, 0), function())  # another client's, or weight's

    capsys.readouterr()
    with pretend.gpu(capture):
        record, state = run(fedavg, FED, tmp_path / "fast")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("engine")]
    why = str(PROBLEMS[name] or "two minibatches do not give what the plain loop gives")
    assert len(said) == ways and all(line.endswith(f"slower: {why}") for line in said)
    assert record["environment"]["slower"] == [f"{way}: {why}" for way in fl.training.WAYS[:ways]]
    torch.testing.assert_close(state["w"], want["w"], rtol=0, atol=1e-6 if ways == 1 else 0)


def test_an_error_that_leaves_the_gpu_unusable_is_raised_again(monkeypatch):
    fed = federation(FED)
    fed.way, fed.map = "together", map

    def fails(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fl.training, "capture", fails)
    monkeypatch.setattr(fl.training, "now", fails)  # it is the answer to everything from then on
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        fed.train(fedavg.local_training(fed.net, fed.args), np.arange(4), 0,
                  own=[fed.initial_weights().expand(4, -1)], shared=[fed.eta(0)])


def test_too_little_memory_for_one_client_is_refused(capsys):
    def client_update(w, epochs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    fed = federation(FED)
    fed.way, fed.map = "together", map
    with pytest.raises(SystemExit) as stop:
        fed.train(client_update, np.arange(4), 0, own=[torch.zeros(4, 3)])
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and "out of GPU memory with one client at a time" in error
    assert out.count("engine") == 2


def test_a_model_that_makes_tensors_on_the_cpu_is_refused(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Linear):\n    def __init__(self, classes, size):\n"
        "        super().__init__(3 * size[0] * size[1], classes)\n    def forward(self, x):\n"
        "        x = x * torch.linspace(.5, 1.5, x.shape[3])\n"
        "        return super().forward(x.flatten(1))\n")
    argv = [*QUICK, "--model", f"{tmp_path}/mine.py:Mine", "--out", str(tmp_path)]
    fedavg.main(argv)
    with pretend.gpu():
        refused(capsys, "--model", fedavg.main, argv)


@pytest.mark.parametrize("frozen", ["number", "tensor", "branch", None])
def test_a_step_that_a_graph_would_freeze_is_found(frozen, capsys):
    """What changes from call to call must be among a step's arguments."""
    with pretend.gpu():
        fed, call = federation(FED), [1.0]
        kept = [torch.ones(2, device=pretend.GPU)]

        @common.step
        def step(w, b):
            w = w + w if frozen == "branch" and call[0] > 1 else w
            w = w * call[0] if frozen == "number" else w
            return w + kept[0] if frozen == "tensor" else w

        def client_update(w, epochs):
            for minibatches in epochs:
                for b in minibatches:
                    w = step(w, b)
            return w

        for call[0] in (1.0, 2.0):
            kept = [torch.ones(2, device=pretend.GPU)]
            fed.train(client_update, np.arange(4), 0, own=[torch.zeros(4, 2, device=pretend.GPU)])
        assert bool(fed.failed) == bool(frozen)


def test_an_old_gpu_is_the_one_of_the_device(monkeypatch):
    """One that is not there is no old one; find_device refuses it."""
    cards = {"cuda": (7, 5), "cuda:1": (9, 0)}

    def capability(name):
        if name not in cards:
            raise AssertionError("Invalid device id")
        return cards[name]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    old = [fl.training.before_ampere(name) for name in ("cuda", "cuda:1", "cuda:2")]
    assert old == [True, False, False]


# The pretended GPU itself, and the check of a real one

CPU_WITH_GPU = [
    lambda x: x + torch.ones(3), lambda x: torch.cat([x, torch.tensor([1.0])]),
    lambda x: torch.arange(3)[x.long()], lambda x: x.numpy(),
    lambda x: x.new_zeros(3) * torch.from_numpy(np.ones(3)),
    lambda x: torch.func.vmap(lambda a: a * torch.ones(2))(x[:, None]),
    lambda x: torch.tensor(0.0).add_(x[0]),
    lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1))]
NOT_TO_BE_CAPTURED = [
    lambda x: x.sum().item(), lambda x: x if x[0] > 0 else -x, lambda x: x[x > 0],
    lambda x: x[torch.tensor([0, 1])], lambda x: x[[0, 1]], lambda x: x[np.array([0, 1])],
    lambda x: x * torch.tensor(0.1, device=x.device), lambda x: x * x.new_tensor([0.1]),
    lambda x: x.to("cpu"), lambda x: torch.bincount(x.long()), lambda x: x * torch.tensor(0.1),
    lambda x: x * torch.ones(3).to(x.device), lambda x: x.copy_(torch.ones(3)),
    lambda x: torch.func.vmap(lambda a: a * torch.tensor(0.1))(x),
    lambda x: fl.training.grad(lambda a: (a * torch.tensor(0.1)).sum())(x)]


def test_what_a_gpu_refuses_the_pretended_one_refuses():
    with pretend.gpu() as operations:
        x = torch.zeros(3, device=pretend.GPU)
        for mistake in CPU_WITH_GPU:
            with pytest.raises(pretend.Wrong):
                mistake(x)
        for mistake in NOT_TO_BE_CAPTURED:
            mistake(x)  # outside of a capture a GPU does it
            operations.capturing = True
            with pytest.raises(pretend.Wrong):
                mistake(x)
            operations.capturing = False


def test_what_a_gpu_does_the_pretended_one_does():
    """And tensors made from the GPU's are the GPU's."""
    with pretend.gpu():
        x, index = torch.zeros(3, device=pretend.GPU), torch.tensor([0, 2])
        ones = lambda a: a * torch.ones(2, device=a.device)
        for y in (x[index], x * torch.tensor(2.0), torch.ones(3).to(x.device), torch.zeros_like(x),
                  torch.ones(3, device=x.device), torch.func.vmap(ones)(x[:, None])):
            assert y.device == pretend.GPU
        assert x.cpu().numpy().sum() == 0 and x.cpu().device == pretend.CPU
        assert float(x[0]) == 0 and x.tolist() == [0, 0, 0]


def test_the_check_of_a_gpu(tmp_path, capsys, monkeypatch):
    """A table and a record, row by row; a row that fails says why."""
    monkeypatch.setitem(bench.WORKLOADS, "fedavg", (bench.LEAF, 5, (2, 10), None))
    monkeypatch.setattr(fl.training, "SMALL", 500_000)
    rows = ["fedavg", "fedspa", "fedavg, tfcnn", "10 x fedavg", "none"]
    with pretend.gpu():
        gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--only", *rows], SMALL)
    path, = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["rows"]
    assert list(found) == rows and "KeyError" in found["none"]["error"]
    assert [found[name]["way"] for name in rows[:4]] == ["together"] * 2 + ["graphs"] * 2
    assert all(found[name]["differs"] < 1e-3 and found[name]["times"] > 0 for name in rows[:4])
    assert found["10 x fedavg"]["plain"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in printed[2:7]] == rows and "failed" in printed[6]


def test_a_check_that_is_stopped_keeps_its_rows(tmp_path, monkeypatch):
    """Rows that diverge are among them; a later call adds its own."""
    codes = {"superfed": 3, "fedslr": 143}
    real = gpu_check.importlib.import_module
    monkeypatch.setattr(gpu_check.importlib, "import_module", lambda name: real(name)
                        if name not in codes else
                        SimpleNamespace(main=lambda argv: sys.exit(codes[name])))

    def check(*rows):
        with pretend.gpu():
            gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--only", *rows], SMALL)

    def rows():
        return json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]

    with pytest.raises(SystemExit) as stop:
        check("fedavg", "superfed", "fedslr", "psinet")
    assert stop.value.code == 143 and list(rows()) == ["fedavg", "superfed"]
    assert rows()["superfed"]["error"] == "RuntimeError: exit code 3"
    check("fedavgm")
    assert list(rows()) == ["fedavg", "superfed", "fedavgm"]


def test_without_a_gpu_the_check_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_check.main([])
    assert capsys.readouterr().out == "no CUDA GPU is here: nothing was checked\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a real GPU")
def test_a_real_gpu(tmp_path):
    rows = ["superfed", "psinet", "persfl", "fedslr", "fedavg, tfcnn", "10 x resnet18"]
    gpu_check.main(["--out", str(tmp_path), "--only", *rows])
    found = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert not any(row["why"] for row in found.values()), found
    assert found.pop(rows[-1])["differs"] < 0.1  # with TF32
    assert all(row["differs"] < 1e-4 for row in found.values()), found
