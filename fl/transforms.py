"""TRANSFORMS turn images into a model's inputs, in training with random changes.

TRANSFORMS[name](data) is a function of images [n,H,W,C] and, in training, of draws u [n,DRAWS] in
[0,1). It returns floats [n,C,h,w]. They stay channels-last in memory, which makes convolutions
fastest on CPUs and tensor cores.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F


def unit(x):
    """Returns pixels as floats: uint8 from 0 to 1, floats as they are."""
    return x if x.is_floating_point() else x.float() / 255


def scale(x, u=None):
    return unit(x.permute(0, 3, 1, 2))


def window(x, top, left, size, flip):
    """Cuts (h, w) = size pixels from each image, from row top [n] and column left [n] on, and
    mirrors them where flip [n]: [n,h,w,C]."""
    i, j = (torch.arange(length, device=x.device) for length in size)
    rows = top[:, None] + i  # [n, h]
    columns = left[:, None] + torch.where(flip[:, None], j.flip(0), j)  # [n, w]
    n = torch.arange(len(x), device=x.device)
    return x[n[:, None, None], rows[:, :, None], columns[:, None, :]]


def tensorflow(x, u=None, size=24):
    """Augments like McMahan et al.'s TensorFlow tutorial: random 24x24 window, flip, brightness
    (+-63 of 255), contrast (.2 to 1.8); then gives each image mean 0, deviation 1. Without u it
    takes the central window. Raises ValueError for smaller x.
    """
    height, width = x.shape[1:3]
    if min(height, width) < size:
        raise ValueError(f"--transform tensorflow cuts out {size}x{size} pixels")
    top, left = ((pixels - size) // 2 for pixels in (height, width))
    if u is None:
        x = x[:, top:, left:][:, :size, :size]
    else:
        top, left = (u[:, 0] * (height - size + 1)).long(), (u[:, 1] * (width - size + 1)).long()
        x = window(x, top, left, (size, size), u[:, 2] < 0.5)
    x = x.float() if x.dtype == torch.uint8 else 255 * unit(x)
    if u is not None:
        x = x + 63 * (2 * u[:, 3, None, None, None] - 1)
        mean = x.mean((1, 2), keepdim=True)
        x = (x - mean) * (0.2 + 1.6 * u[:, 4, None, None, None]) + mean
    x = x - x.mean((1, 2, 3), keepdim=True)
    std = x.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=x[0].numel() ** -0.5)
    return (x / std).permute(0, 3, 1, 2)


def moments(images):
    """Returns mean and standard deviation of each channel [C] in float64, of pixels as `unit`
    returns them."""
    if images.dtype == np.float32:  # in parts: all in float64 would be twice the memory
        parts, n = np.array_split(images, -(-len(images) // 1000)), images[..., 0].size
        mean = sum(part.sum((0, 1, 2), dtype=np.float64) for part in parts) / n
        square = sum(((part - mean) ** 2).sum((0, 1, 2)) for part in parts) / n
        return mean, np.sqrt(square)
    counts = np.stack([np.bincount(images[..., c].ravel(), minlength=256)
                       for c in range(images.shape[3])], 1)
    values, share = np.arange(256)[:, None] / 255, counts / counts.sum(0)
    mean = (share * values).sum(0)
    return mean, np.sqrt((share * (values - mean) ** 2).sum(0))


def normalize(data):
    """Returns a transform to mean 0 and standard deviation 1 a channel, over training images."""
    mean, std = moments(data.images[: data.n_train])
    least = 1e-6 * np.sqrt(mean**2 + std**2).max()
    both = np.stack([mean, np.where(std > least, std, 1)])  # 1: of a channel that is constant
    on = functools.cache(lambda device: torch.tensor(both, dtype=torch.float32, device=device))

    def transform(x, u=None):
        mean, std = on(x.device)
        return ((unit(x) - mean) / std).permute(0, 3, 1, 2)

    return transform


def fedslr(data):
    """Returns FedSLR's: normalize; a flip with probability 1/2; and with probability 1/2 a shift by
    up to 4 pixels each way (8 for Tiny ImageNet; 0 fills in). Its code normalises Tiny ImageNet by
    .5 and .5.
    """
    normalized = normalize(data)
    size, pad = data.images.shape[1:3], 8 if data.images.shape[1] == 64 else 4

    def transform(x, u=None):
        x = normalized(x)
        if u is None:
            return x
        move = u[:, 1] < 0.5
        top, left = (torch.where(move, (u[:, i] * (2 * pad + 1)).long(), pad) for i in (2, 3))
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad))
        return window(x, top, left, size, u[:, 0] < 0.5).permute(0, 3, 1, 2)

    return transform


TRANSFORMS = {
    "scale": lambda data: scale,  # to [0, 1], and nothing else (SuPerFed's code)
    "centre": lambda data: lambda x, u=None: scale(x) - 0.5,  # to [-1/2, 1/2]: docs/fedavg.md
    "half": lambda data: lambda x, u=None: (scale(x) - 0.5) / 0.5,  # as Normalize(.5, .5)
    "normalize": normalize, "tensorflow": lambda data: tensorflow, "fedslr": fedslr,
}
DRAWS = {name: {"tensorflow": 5, "fedslr": 4}.get(name, 0) for name in TRANSFORMS}  # per image
