"""Accuracy, loss and calibration, from logits."""

import torch
import torch.nn.functional as F


def score(logits, y, group, groups, bins=15):
    """Returns each group's measures (name -> [groups], float64) from logits [n, classes], y [n] and
    group [n] in 0..groups-1.

    top1, top5 and loss (cross-entropy) are means over a group's images. Calibration as in Guo et
    al. 2017: the largest softmax probability p falls into the bin (i/15, (i+1)/15]; ece is the mean
    over images of their bin's |mean p - accuracy|, mce the largest such gap. All images of a group
    count at once, not minibatch by minibatch.
    """
    logits = logits.double()
    n = torch.bincount(group, minlength=groups).clamp(min=1)

    def total(values, where, size):
        zeros = torch.zeros(size, dtype=torch.double, device=y.device)
        return zeros.index_add_(0, where, values.double())

    right = logits.topk(min(5, logits.shape[1])).indices == y[:, None]
    top, sure = right[:, 0].double(), logits.softmax(1).amax(1)
    cell = group * bins + ((sure * bins).ceil().long() - 1).clamp(0, bins - 1)
    count = torch.bincount(cell, minlength=groups * bins)
    gap = total(sure - top, cell, groups * bins).abs()
    loss = F.cross_entropy(logits, y, reduction="none")
    return {"top1": total(top, group, groups) / n, "top5": total(right.any(1), group, groups) / n,
            "loss": total(loss, group, groups) / n, "ece": gap.view(groups, bins).sum(1) / n,
            "mce": (gap / count.clamp(min=1)).view(groups, bins).amax(1)}
