"""What docs/superfed.md, D12, says of validation images: would they choose a good lambda?

    python tests/measure_lambda.py RUN [RUN ...]     (folders of superfed.py with its state.pt; minutes each on one core)

Some of each client's test images play the validation images. lambda is chosen on them, 1,000 times with other images, by
accuracy or by loss. Printed is by how much the accuracy of the chosen lambda on all test images is below the best lambda's.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import common  # noqa: E402
import superfed  # noqa: E402


def answers(folder):
    """Whether each model is right on each of its client's test images, and its loss there: [11, K, images] each."""
    args = json.loads((folder / "result.json").read_text())["args"]
    ours = superfed.arguments(["--dataset", args["dataset"]])
    vars(ours).update(args, device="cpu")
    federation = common.Federation(ours)
    state = torch.load(folder / "state.pt", weights_only=True)["state"]
    right, loss = [], []
    for lam in superfed.LAMBDAS:
        logits = [federation.logits(superfed.mix(state["w_f"], w_l, lam), images)
                  for w_l, images in zip(state["w_l"], federation.split.test)]
        labels = [federation.labels[torch.from_numpy(images)] for images in federation.split.test]
        right.append([(z.argmax(1) == y).tolist() for z, y in zip(logits, labels)])
        loss.append([F.cross_entropy(z.double(), y, reduction="none").tolist() for z, y in zip(logits, labels)])
    return np.array(right, float), np.array(loss)


for folder in map(pathlib.Path, sys.argv[1:]):
    right, loss = answers(folder)
    _, K, n = right.shape
    accuracy, rng = right.mean((1, 2)), np.random.default_rng(0)
    for size in (n // 2, n // 4):
        for name, measure in (("accuracy", -right), ("loss", loss)):
            held = [rng.permuted(np.tile(np.arange(n), (K, 1)), axis=1)[:, :size] for _ in range(1000)]
            chosen = [np.take_along_axis(measure, images[None], 2).mean((1, 2)).argmin() for images in held]
            below = accuracy.max() - accuracy[chosen]
            print(f"{folder.name}: {size} images of a client, by {name}: {below.mean():.4f} ({below.max():.4f}) below the best")
