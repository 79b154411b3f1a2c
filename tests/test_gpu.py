"""The GPU's ways through whole runs, on a GPU that is pretended (pretend.py), with a function call
in place of each CUDA graph; and what happens when something goes wrong there."""

import json

import gpu_check
import memory
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import baselines
import fedavg
import fedslr
import fl.gpu
import fl.machine
import pretend
import superfed
from conftest import QUICK, eager, federation, killed, on_a_gpu, refused, run

SMALL = [*gpu_check.FEW[2:], "--device", "cpu"]
FED = [*QUICK, "--split", "iid", "--model", "mnistnet"]


LIKE_OTHERS = ("superfed, unequal", "local", "centralised", "fedavg-ft", "fedprox-ft", "fedper",
               "apfl")  # whose steps are those of another


@pytest.mark.parametrize("name", [
    name for name in gpu_check.ALGORITHMS if name not in LIKE_OTHERS])
def test_all_clients_at_once_give_what_the_loop_gives(name):
    """Each step is captured, and what is repeated is what was captured. test_matrix.py does so with
    unequal clients, one after the other."""
    module, *flags = [*gpu_check.ALGORITHMS[name], "--dataset", "shapes", "--rounds", "2", *SMALL]
    flags += ["--model", "mnistnet"] if module == "baselines" else []  # others have convolutions
    loop, wanted, _, w_0 = gpu_check.run(module, flags)
    with pretend.gpu(way="together"):
        record, found, federation, _ = gpu_check.run(module, flags)
    assert not federation.training.gave_up and federation.training.used == "together"
    # with BatchNorm one rounding decides a ReLU otherwise
    near = {"fedavg, bf16": 0.3, "psinet, BatchNorm": 0.03}.get(name, 1e-3)
    assert gpu_check.difference(wanted, found, w_0) < near
    assert all(record[key] == loop[key] for key in ("split", "bytes_up", "bytes_down"))


def test_a_run_is_resumed_on_it(tmp_path):
    """With what clients keep on the device, and in the host's memory."""
    argv = [*FED, "--mix", "layer", "--start", "0", "--rounds", "3", "--limit", "100"]
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
    why = str(PROBLEMS[name] or "a minibatch does not give what the plain loop gives")
    assert len(said) == ways and all(line.endswith(f"slower: {why}") for line in said)
    assert record["environment"]["slower"] == [f"{way}: {why}" for way in fl.gpu.WAYS[:ways]]
    torch.testing.assert_close(state["w"], want["w"], rtol=0, atol=1e-6 if ways == 1 else 0)


def test_an_error_that_leaves_the_gpu_unusable_is_raised_again(monkeypatch):
    fed = on_a_gpu(federation(FED))

    def fails(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fl.gpu, "capture", fails)
    monkeypatch.setattr(fl.gpu, "now", fails)  # it is the answer to everything from then on
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        fed.train(fedavg.local_training(fed.net, fed.args), np.arange(4), 0,
                  own=[fed.initial_weights().expand(4, -1)], shared=[fed.eta(0)])


def test_too_little_memory_for_one_client_is_refused(capsys):
    def client_update(w, epochs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    fed = on_a_gpu(federation(FED))
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


def test_an_old_gpu_is_the_one_of_the_device(monkeypatch):
    """One that is not there is no old one; find_device refuses it."""
    cards = {"cuda": (7, 5), "cuda:1": (9, 0)}

    def capability(name):
        if name not in cards:
            raise AssertionError("Invalid device id")
        return cards[name]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    old = [fl.machine.lacks_tf32(name) for name in ("cuda", "cuda:1", "cuda:2")]
    assert old == [True, False, False]


@pytest.mark.parametrize("tf32", [True, False])
def test_amds_gpus_train_by_the_loop(tf32, monkeypatch):
    """And PyTorch itself says whether one has TF32: its capability means nothing."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: tf32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (9, 0))
    args = federation(FED).args
    assert fl.gpu.ways_to_try(torch.device("cuda", 0), args, 1000) == ("loop",)
    assert fl.machine.lacks_tf32() == (not tf32)


def test_which_ways_are_tried(monkeypatch):
    args, cuda = federation(FED).args, torch.device("cuda", 0)
    tried = lambda *given: fl.gpu.ways_to_try(*given)
    assert tried(cuda, args, fl.gpu.SMALL) == ("together", "graphs", "loop")
    assert tried(cuda, args, fl.gpu.SMALL + 1) == ("graphs", "loop")
    assert tried(torch.device("cpu"), args, 1000) == ("loop",)
    args.engine = "loop"
    assert tried(cuda, args, 1000) == ("loop",)


@pytest.mark.parametrize("nccl, device, backend", [
    (True, "cuda:0", "nccl"), (False, "cuda:0", "gloo"), (True, "cpu", "gloo")])
def test_processes_are_connected_by_what_is_there(nccl, device, backend, monkeypatch):
    """On Windows PyTorch has no NCCL."""
    begun, dist = [], fl.machine.dist
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(fl.machine, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **more: begun.append((name, more)))
    device = torch.device(device)
    assert fl.machine.join_processes(device) == (1, 2)
    (name, more), = begun
    assert name == backend and more["device_id"] == (device if backend == "nccl" else None)


@pytest.mark.parametrize("text, processes, cores", [
    ("200000 100000", 1, 2), ("250000 100000", 1, 3), ("max 100000", 1, 64), (None, 1, 64),
    ("50000 100000", 1, 1), ("9900000 100000", 1, 64), ("800000 100000", 4, 2), (None, 4, 16)])
def test_a_container_has_the_cores_that_it_may_use(text, processes, cores, tmp_path, monkeypatch):
    """Of 64; docker run --cpus=2 writes 200000 microseconds of every 100000."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    limit = tmp_path / "cpu.max"
    if text:
        limit.write_text(text + "\n")
    assert fl.machine.cores(limit) == cores


@pytest.mark.parametrize("rounds, resets", [(1, []), (3, [1])])
def test_the_peak_of_memory_is_that_after_round_one(rounds, resets, monkeypatch):
    training, seen = on_a_gpu(federation([*FED, "--rounds", str(rounds)])).training, []
    monkeypatch.setattr(training, "reset_peak", lambda: seen.append(done))
    for done in range(1, rounds + 1):
        training.end_round(done)
    assert seen == resets


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (4, 6, 3, 3), (5, 7)])
def test_a_gpu_shrinks_singular_values_as_an_svd_does(shape):
    """fedslr.py's line 7, with as many rows as columns, fewer and more; and all of them are shrunk
    to 0."""
    v = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
    A = v.transpose(1, 2).reshape(shape[0] * 3, -1) if v.dim() == 4 else v
    U, s, V = np.linalg.svd(A.double().numpy(), full_matrices=False)
    for tau in (0.0, float(s[2:4].mean()), float(2 * s[0])):
        shrunk, rank = fedslr.shrink_on_gpu(v, tau)
        kept = np.maximum(s - tau, 0)
        want = torch.from_numpy((U * kept) @ V).float()
        want = want.view(shape[0], 3, shape[1], 3).transpose(1, 2) if v.dim() == 4 else want
        torch.testing.assert_close(shrunk, want, rtol=0, atol=1e-5)
        assert int(rank) == (kept > 0).sum() and shrunk.dtype == v.dtype


# The check of a real one


@pytest.mark.parametrize("way", ["together", pytest.param("graphs", marks=pytest.mark.slow)])
def test_the_variant_that_compiles_traces_whole_steps(way, monkeypatch):
    fed, traced = on_a_gpu(federation([*FED, "--limit", "80"]), way), []
    monkeypatch.setattr(fl.gpu, "capture", eager)
    with gpu_check.patched(gpu_check.compiled(lambda module, _: traced.append(module) or module)):
        own = [fed.initial_weights().expand(fed.K, -1)]
        fed.train(fedavg.local_training(fed.net, fed.args), fed.everyone, 0, own,
                  [torch.tensor(0.1)])
    assert fed.training.used == way and not fed.training.gave_up
    assert len(traced) == len(fed.training.graphs) == 1


def test_the_check_of_a_gpu(tmp_path, capsys):
    """A table and a record, row by row; a row that fails says why."""
    gpu_check.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--variants", "--only",
                    "fedavg", "evaluation", "none"])
    path, = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert "KeyError" in rows["none"]["error"] and "failed" in capsys.readouterr().out
    assert rows["evaluation"]["differs"] < 1e-5
    row = rows["fedavg"]
    assert row["way"] == "together" and row["differs"] < 1e-3 and not row["why"]
