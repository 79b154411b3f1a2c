"""The GPU's way through whole runs: many clients in one step, replayed, evaluated together. Without a GPU a CPU goes that way for
two algorithms, with a function call in place of the graph; it is slow there."""

import importlib

import numpy as np
import pytest
import torch

import common
from conftest import run
from test_processes import COMMANDS

GPU = torch.cuda.is_available()
NAMES = COMMANDS if GPU else ["fedavg", "persfl"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gpus_way_gives_what_the_loop_gives(name, tmp_path, monkeypatch):
    """Same weights, accuracies and bytes; on a GPU every step was captured."""
    module, *argv = COMMANDS[name]
    loop, want = run(importlib.import_module(module), argv, tmp_path / "loop")
    init = common.Federation.__init__

    def as_on_a_gpu(self, args):
        init(self, args)
        self.vmap = self.graphs = True
        self.parallel = None

    monkeypatch.setattr(common.Federation, "__init__", as_on_a_gpu)
    device = ["--device", "cuda", "--precision", "fp32"] if GPU else []
    record, state = run(importlib.import_module(module), [*argv, *device], tmp_path / "together")
    for key in ("split", "parameters", "bytes_up", "bytes_down"):
        assert record[key] == loop[key]
    for key, value in want.items():
        if torch.is_tensor(value):
            torch.testing.assert_close(state[key], value, atol=1e-4, rtol=1e-3)
    for part in loop["final"].keys() & {"global", "personal"}:
        for measure, value in loop["final"][part].items():
            assert np.allclose(value, record["final"][part][measure], atol=0.02), (part, measure)
    assert any("padding" in row for row in record["rounds"])
    if GPU:
        assert record["environment"]["graphs"] and record["environment"]["ways"]
