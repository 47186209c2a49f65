"""ResNet in plain torch.

Source: He et al. 2015, "Deep Residual Learning for Image Recognition", table 1. In the bottleneck the 3x3 convolution
has the stride, not the first 1x1 (the variant known as v1.5), and the last BatchNorm of each block starts at zero, so that
each block starts as the identity (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from jobs.imagefolder.config import ModelConfig

BLOCKS_OF_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BOTTLENECK_FROM = 50
"""From this depth on, blocks are bottlenecks."""


class ResNet(nn.Module):
    """Logits of the classes: [batch, 3, height, width] -> [batch, classes]."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        block = Bottleneck if config.depth >= BOTTLENECK_FROM else BasicBlock
        if config.stem == "small":
            self.stem = nn.Sequential(_conv(3, config.width, 3), nn.BatchNorm2d(config.width), nn.ReLU(inplace=True))
        else:
            self.stem = nn.Sequential(
                _conv(3, config.width, 7, stride=2),
                nn.BatchNorm2d(config.width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        stages: list[nn.Module] = []
        channels = config.width
        for number, blocks in enumerate(BLOCKS_OF_STAGES[config.depth]):
            inner = config.width * 2**number
            stage: list[nn.Module] = []
            for position in range(blocks):
                stride = 2 if number > 0 and position == 0 else 1
                stage.append(block(channels, inner, stride))
                channels = inner * block.expansion
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(channels, classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images)).mean(dim=(2, 3))  # [batch, channels]
        logits: Tensor = self.classify(features)
        return logits

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (BasicBlock, Bottleneck)):
                nn.init.zeros_(module.last_norm.weight)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: [batch, channels, h, w] -> [batch, inner, h / stride, w / stride]."""

    expansion = 1

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, inner, 3, stride=stride)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, 3)
        self.last_norm = nn.BatchNorm2d(inner)
        self.shortcut = _shortcut(channels, inner, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.last_norm(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1: [batch, channels, h, w] -> [batch, 4 * inner, h / stride, w / stride]."""

    expansion = 4

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, inner, 1)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, 3, stride=stride)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv(inner, inner * self.expansion, 1)
        self.last_norm = nn.BatchNorm2d(inner * self.expansion)
        self.shortcut = _shortcut(channels, inner * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.last_norm(self.conv3(y)) + self.shortcut(x))


def _conv(channels: int, out: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(_conv(channels, out, 1, stride=stride), nn.BatchNorm2d(out))
