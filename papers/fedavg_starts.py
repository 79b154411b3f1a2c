"""The 2NN and MNIST's CNN with other initial weights, or with pixels from -1 to 1. The paper gives
neither the initial weights nor the range of the pixels. docs/fedavg.md, "Why these pixels", has the
results. The classes have the names that the records use. symmetric needs --transform scale.

    python fedavg.py --dataset mnist --epochs 1 --target .97 --lr .1 --transform scale \
        --model papers/fedavg_starts.py:symmetric
"""

from fl.models import MnistCNN, TwoNN, xavier_normal


class glorot(TwoNN):
    start = staticmethod(xavier_normal)


class lecun(TwoNN):
    def start(self, name, shape):
        return ("constant", 0.0) if name.endswith("bias") else ("normal", shape[1] ** -0.5)


class normal(TwoNN):
    def start(self, name, shape):
        return ("constant", 0.1) if name.endswith("bias") else ("normal", 0.1)


class symmetric(TwoNN):
    def forward(self, x):
        return super().forward(2 * x - 1)  # -1 to 1


class tensorflow_cnn(MnistCNN):
    """With the initial weights of TensorFlow's MNIST example: truncated normals."""

    def start(self, name, shape):
        if name.endswith("bias"):
            return "constant", 0.0 if name == "conv1.bias" else 0.1
        return "truncated", 0.1
