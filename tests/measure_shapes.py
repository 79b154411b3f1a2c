"""What the docstring of datasets.shapes quotes: test accuracy of a linear classifier and of the CNN, trained on all its images.

    python tests/measure_shapes.py
"""

import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import common  # noqa: E402
import datasets  # noqa: E402
from conftest import linear  # noqa: E402


common.MODELS["linear"] = linear
x, y, u, v = map(torch.from_numpy, datasets.shapes())
for name in ("linear", "cnn"):
    net = common.Net(name, (3, 32, 32), 10)
    w = net.init(common.stream(0, "initialisation")).requires_grad_()
    optimizer = torch.optim.Adam([w], 1e-3)
    torch.manual_seed(0)
    for epoch in range(10):
        for index in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(net(w, common.scale(x[index])), y[index]).backward()
            optimizer.step()
    with torch.no_grad():
        right = torch.cat([net(w, common.scale(part)).argmax(1) for part in u.split(500)]) == v
    print(f"{name:>8}: {right.double().mean():.3f} after 10 epochs of Adam")
