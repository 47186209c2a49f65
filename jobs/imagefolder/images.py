"""From image files to samples: read, crop, resize, mirror. Pixels stay bytes until they are on the device."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from hpc.errors import UsageError
from jobs.imagefolder.config import DataConfig
from jobs.imagefolder.index import Split

Box = tuple[float, float, float, float]
"""Left, upper, right, lower, in pixels of the source image."""
RATIOS = (3 / 4, 4 / 3)
"""Narrowest and widest random crop, width over height (Szegedy et al. 2014, "Going Deeper with Convolutions", section 6)."""


class UnreadableImage(UsageError):
    """A file that is no image, or a damaged one; the message names it.

    A data-loader process hands an exception on as text, with its traceback before it: only the last line is kept.
    """

    def __init__(self, message: str) -> None:
        last = message.strip().splitlines()[-1]
        super().__init__(last.removeprefix(f"{type(self).__module__}.{type(self).__qualname__}: "))


class Images(Dataset[tuple[Tensor, int]]):
    """The samples of a split: (pixels [3, size, size] uint8, class).

    In training the crop and the mirroring of an image are drawn from torch's generator, which the loop seeds.
    """

    def __init__(self, split: Split, data: DataConfig, *, augment: bool) -> None:
        self.split = split
        self.data = data
        self.augment = augment

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.split.path(index))
        if self.augment:
            choice = random.Random(int(torch.randint(2**62, ())))
            box = random_crop(image.size, choice, min_area=self.data.crop_min_area)
            mirrored = self.data.flip and choice.random() < 0.5
        else:
            box = middle_square(image.size, self.data.size / self.data.eval_resize)
            mirrored = False
        return to_tensor(image, box, self.data.size, mirrored=mirrored), self.split.labels[index]


def read_image(path: Path) -> Image.Image:
    """The image, decoded, in RGB.

    Raises:
        UnreadableImage: the file is missing, unreadable, no image, damaged, or too large to be meant.
    """
    try:
        with Image.open(path) as image:
            rgb: Image.Image = image.convert("RGB")
            return rgb
    # PIL raises SyntaxError for a damaged PNG.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise UnreadableImage(
            f"cannot read the image {path}: {' '.join(reason.split())}; mend or remove it (and write data.index anew)"
        ) from error


def random_crop(size: tuple[int, int], choice: random.Random, *, min_area: float) -> Box:
    """A random part of an image of this (width, height): its area from `min_area` to all, its shape within RATIOS.

    After ten shapes that do not fit, the largest middle part within RATIOS.
    """
    width, height = size
    for _ in range(10):
        area = width * height * choice.uniform(min_area, 1.0)
        ratio = math.exp(choice.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = choice.randint(0, width - w), choice.randint(0, height - h)
            return (left, upper, left + w, upper + h)
    return _middle(size, min(width, height * RATIOS[1]), min(height, width / RATIOS[0]))


def middle_square(size: tuple[int, int], share: float) -> Box:
    """The square in the middle whose side is this share of the image's shorter side.

    Resizing this box at once gives the same part of the image as resizing the whole and cutting out the middle.
    """
    return _middle(size, min(size) * share, min(size) * share)


def to_tensor(image: Image.Image, box: Box, size: int, *, mirrored: bool) -> Tensor:
    """The part of the image in `box`, resized to a square: [3, size, size] uint8."""
    part = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if mirrored:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, 3).permute(2, 0, 1).contiguous()


def _middle(size: tuple[int, int], width: float, height: float) -> Box:
    left, upper = (size[0] - width) / 2, (size[1] - height) / 2
    return (left, upper, left + width, upper + height)
