"""A network of one's own: an ordinary nn.Module, for --model docs/mynet.py:MyNet."""

from torch import nn


class MyNet(nn.Module):
    """A residual block with GroupNorm between two convolutions: 10,122 weights for 10 classes."""

    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 16, 3, stride=2, padding=1), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.block(x))
