"""The papers' networks, as ordinary nn.Modules. MODELS: those of --model.

A network is built for images with `channels` and `size` = (H, W). It registers its parameters in
the order in which an image passes them, and has neither BatchNorm nor dropout. start(name, shape)
says how to initialise the parameter `name`; `shape` is that of its layer's weight. It returns
("uniform", bound) for +-bound, ("normal", deviation), ("truncated", deviation) for a normal
distribution without values beyond two deviations, or ("constant", value).
"""

import functools
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def pytorch_default(name, shape):
    """PyTorch's initialisation: weights and biases are uniform in +-1/sqrt(fan in)."""
    return "uniform", float(np.prod(shape[1:])) ** -0.5


def xavier_normal(name, shape):
    """Glorot and Bengio 2010: weights have the variance 2 / (fan in + fan out); biases are 0."""
    if name.endswith("bias"):
        return "constant", 0.0
    return "normal", float(2 / ((shape[0] + shape[1]) * np.prod(shape[2:]))) ** 0.5


def he_normal(name, shape):
    """He et al. 2015, over the fan out: weights have the variance 2 / fan out; biases are 0."""
    if name.endswith("bias"):
        return "constant", 0.0
    return "normal", float(2 / (shape[0] * np.prod(shape[2:]))) ** 0.5


class Chain(nn.Sequential):
    """A chain of named layers, initialised as in PyTorch unless the network has a `start`."""

    start = staticmethod(pytorch_default)

    def __init__(self, **layers):
        super().__init__(OrderedDict(layers))


class CNN(Chain):
    """SuPerFed's five-layer CNN (its Table 4): 109,022 weights for EMNIST, 94,186 and 140,356 for
    CIFAR-10 and CIFAR-100, 181,416 for Tiny ImageNet. Pooling before ReLU gives the same result
    with less work. Xavier initialisation is that of the authors' code.
    """

    start = staticmethod(xavier_normal)

    def __init__(self, channels, classes, size):
        if size not in ((28, 28), (32, 32), (64, 64)):
            raise ValueError("it is made for 28x28, 32x32 and 64x64; resnet18, mnistnet and 2nn "
                             "take nearly any size")
        pool, kernel = (3 if size == (64, 64) else 2), (3 if size == (32, 32) else 2)
        super().__init__(
            conv1=nn.Conv2d(channels, 32, 5), pool1=nn.MaxPool2d(pool), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5), pool2=nn.MaxPool2d(pool), relu2=nn.ReLU(),
            conv3=nn.Conv2d(64, 32, kernel), pool3=nn.MaxPool2d(pool), relu3=nn.ReLU(),
            flatten=nn.Flatten(), fc1=nn.Linear(32, 512), relu4=nn.ReLU(),
            fc2=nn.Linear(512, classes))


class LocalResponseNorm(nn.Module):
    """TensorFlow's, with bias 1: x / (1 + alpha * sum of x^2 over the 2*radius+1 nearest
    channels)^beta. PyTorch's own divides alpha by 2*radius+1. A 1x1 convolution with a
    band matrix computes the sum.
    """

    def __init__(self, channels, radius=4, alpha=0.001 / 9, beta=0.75):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        channel = torch.arange(channels)
        band = (channel[:, None] - channel[None, :]).abs() <= radius
        self.register_buffer("band", band.float()[:, :, None, None], persistent=False)

    def forward(self, x):
        return x * (1 + self.alpha * F.conv2d(x * x, self.band)) ** -self.beta


class TFCNN(Chain):
    """McMahan et al.'s CNN for CIFAR, from the TensorFlow tutorial: 1,068,298 weights with 24x24
    images and 10 classes. With ceil_mode, pooling pads as TensorFlow's SAME does. Initial
    weights are the tutorial's from 2016 on; earlier, kernels started smaller.
    """

    decayed = "fc3.weight", "fc4.weight"  # where weight decay acts, as in the tutorial

    def __init__(self, channels, classes, size):
        super().__init__(
            conv1=nn.Conv2d(channels, 64, 5, padding=2), relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, 2, ceil_mode=True), lrn1=LocalResponseNorm(64),
            conv2=nn.Conv2d(64, 64, 5, padding=2), relu2=nn.ReLU(),
            lrn2=LocalResponseNorm(64), pool2=nn.MaxPool2d(3, 2, ceil_mode=True),
            flatten=nn.Flatten(),
            fc3=nn.Linear(64 * (size[0] // 4) * (size[1] // 4), 384), relu3=nn.ReLU(),
            fc4=nn.Linear(384, 192), relu4=nn.ReLU(), out=nn.Linear(192, classes))

    def start(self, name, shape):
        layer, _, part = name.partition(".")
        if part == "bias":
            return "constant", 0.0 if layer in ("conv1", "out") else 0.1
        return "truncated", {"fc3": 0.04, "fc4": 0.04, "out": 1 / 192}.get(layer, 0.05)


class CifarNet(Chain):
    """PersFL's CifarNet: 62,006 weights with 32x32x3 images and 10 classes."""

    def __init__(self, channels, classes, size):
        height, width = (((pixels - 4) // 2 - 4) // 2 for pixels in size)
        super().__init__(
            conv1=nn.Conv2d(channels, 6, 5), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(6, 16, 5), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            flatten=nn.Flatten(), fc1=nn.Linear(16 * height * width, 120), relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84), relu4=nn.ReLU(), fc3=nn.Linear(84, classes))


class MnistNet(Chain):
    """PersFL's network for MNIST: 784-100-10, 79,510 weights."""

    def __init__(self, channels, classes, size):
        super().__init__(
            flatten=nn.Flatten(), fc1=nn.Linear(channels * size[0] * size[1], 100), relu=nn.ReLU(),
            fc2=nn.Linear(100, classes))


class TwoNN(Chain):
    """2nn, McMahan et al.'s network for MNIST: two hidden layers of 200; 199,210 weights."""

    def __init__(self, channels, classes, size):
        super().__init__(
            flatten=nn.Flatten(), fc1=nn.Linear(channels * size[0] * size[1], 200), relu1=nn.ReLU(),
            fc2=nn.Linear(200, 200), relu2=nn.ReLU(), fc3=nn.Linear(200, classes))


class MnistCNN(Chain):
    """McMahan et al.'s CNN for MNIST. Padding gives it the paper's 1,663,370 weights."""

    def __init__(self, channels, classes, size):
        super().__init__(
            conv1=nn.Conv2d(channels, 32, 5, padding=2), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5, padding=2), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            flatten=nn.Flatten(), fc1=nn.Linear(64 * (size[0] // 4) * (size[1] // 4), 512),
            relu3=nn.ReLU(), fc2=nn.Linear(512, classes))


def resnet18(channels, classes, size):
    """ResNet-18 with GroupNorm(2), as in FedSLR.

    For images up to 32x32 it has a 3x3 stem and no bias in the last layer: 11,173,952 weights for
    10 classes, 11,220,032 for 100. For larger ones it is torchvision's, with a 7x7 stem, pooling,
    torchvision's initialisation and a bias: 11,279,112 weights for 200 classes.
    """
    import torchvision  # not above: it takes as long as all other imports

    small, norm = size[0] <= 32, functools.partial(nn.GroupNorm, 2)
    net = torchvision.models.resnet18(num_classes=classes, norm_layer=norm)
    net.conv1 = nn.Conv2d(channels, 64, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
    if small:
        net.maxpool, net.fc = nn.Identity(), nn.Linear(512, classes, bias=False)
    net.start = lambda name, shape: (
        pytorch_default if small or len(shape) == 2 else he_normal)(name, shape)
    return net


def vgg(channels, classes, size, plan):
    """The layers of a VGG: a convolution for each (name, width, whether pooling follows) of plan,
    then three fully connected layers."""
    layers, inputs, (height, width) = {}, channels, size
    for name, outputs, pool in plan:
        layers[name] = nn.Conv2d(inputs, outputs, 3, padding=1)
        if pool:
            layers[name + "-pool"], height, width = nn.MaxPool2d(2), height // 2, width // 2
        layers[name + "-relu"], inputs = nn.ReLU(), outputs
    return layers | {
        "flatten": nn.Flatten(), "fc1": nn.Linear(inputs * height * width, 512),
        "relu1": nn.ReLU(), "fc2": nn.Linear(512, 512), "relu2": nn.ReLU(),
        "fc3": nn.Linear(512, classes)}


class VGG9(Chain):
    """VGG-9 as in FedMA, without its dropout: 3,491,530 weights with 32x32x3 images, 10 classes."""

    def __init__(self, channels, classes, size):
        plan = (("conv1", 32, 0), ("conv2", 64, 1), ("conv3", 128, 0), ("conv4", 128, 1),
                ("conv5", 256, 0), ("conv6", 256, 1))
        super().__init__(**vgg(channels, classes, size, plan))


class VGG16(Chain):
    """VGG-16 (Simonyan and Zisserman 2015, configuration D) for 32x32 images, with fully connected
    layers of 512."""

    def start(self, name, shape):
        return pytorch_default(name, shape) if name.startswith("fc3") else he_normal(name, shape)

    def __init__(self, channels, classes, size):
        stages = (64, 2), (128, 2), (256, 3), (512, 3), (512, 3)
        plan = [(f"conv{stage}-{i}", width, i == depth)
                for stage, (width, depth) in enumerate(stages, 1) for i in range(1, depth + 1)]
        super().__init__(**vgg(channels, classes, size, plan))


MODELS = {"cnn": CNN, "tfcnn": TFCNN, "cifarnet": CifarNet, "mnistnet": MnistNet,
          "mnistcnn": MnistCNN, "resnet18": resnet18, "vgg9": VGG9, "vgg16": VGG16,
          "2nn": TwoNN}
