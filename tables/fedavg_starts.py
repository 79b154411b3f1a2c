"""2NN and MNIST's CNN with other initial weights, or with pixels from -1 to 1. The paper says neither how weights start nor how
pixels are scaled. docs/fedavg.md, "Why these pixels", has the results. symmetric needs --transform scale.

    python fedavg.py --dataset mnist --epochs 1 --target .97 --lr .1 --transform scale --model tables/fedavg_starts.py:symmetric
"""

import torch.nn.functional as F

from common import xavier_normal


def two_nn(start=lambda out, inputs: None, pixels=lambda x: x):
    """common.py's 2nn; start(outputs, inputs): initial values (default: PyTorch's); pixels(x): of pixels x in [0, 1]."""

    def model(m, x, classes):
        x = pixels(x.flatten(1))
        for name, out in (("fc1", 200), ("fc2", 200)):
            x = F.relu(m.linear(name, x, out, init=start(out, x.shape[1])))
        return m.linear("fc3", x, classes, init=start(classes, 200))

    return model


glorot = two_nn(xavier_normal)
lecun = two_nn(lambda out, inputs: (("normal", inputs**-0.5), ("constant", 0.0)))
normal = two_nn(lambda out, inputs: (("normal", 0.1), ("constant", 0.1)))
symmetric = two_nn(pixels=lambda x: 2 * x - 1)  # -1 to 1


def tensorflow_cnn(m, x, classes):
    """common.py's mnistcnn, from the initial weights of TensorFlow's MNIST example: truncated normals; biases 0, then .1."""
    def start(bias):
        return ("truncated", 0.1), ("constant", bias)

    x = F.relu(F.max_pool2d(m.conv("conv1", x, 32, 5, padding=2, init=start(0.0)), 2))
    x = F.relu(F.max_pool2d(m.conv("conv2", x, 64, 5, padding=2, init=start(0.1)), 2))
    x = F.relu(m.linear("fc1", x.flatten(1), 512, init=start(0.1)))
    return m.linear("fc2", x, classes, init=start(0.1))
