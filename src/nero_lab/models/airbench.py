"""The network of the CIFAR-10 speed-run (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds", arXiv:2404.00498).

A fixed whitening convolution, then three blocks of two convolutions, written from the paper's description.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

#: Side of the whitened patches, in pixels.
PATCH = 2
#: Added to the eigenvalues of the patches' covariance, so that noise is not amplified without bound.
WHITENING_EPS = 5e-4
#: Weight of the current batch in the running averages of batch norm; the paper's momentum of 0.6, in torch's terms.
BATCH_NORM_WEIGHT = 0.4


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norm and GELU; max-pooling after the first halves the image.

    The first filters of each convolution start as the identity, as far as there are input channels. Batch norm has
    trained biases, but no gains.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs)
        self.first_norm = _norm(outputs)
        self.second = _convolution(outputs, outputs)
        self.second_norm = _norm(outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.gelu(self.first_norm(F.max_pool2d(self.first(inputs), 2)))
        return F.gelu(self.second_norm(self.second(hidden)))


class Airbench(nn.Module):
    """Whitened patches, three blocks, the maximum over the remaining 3 x 3 pixels, and a linear head without bias.

    Args:
        classes: number of classes.
        width: width of the blocks, relative to the paper's 64, 256 and 256 channels.
        output_scale: factor of the logits.
        head_std: standard deviation that the head starts with; None: torch's default for a linear layer.
    """

    def __init__(
        self, classes: int = 10, *, width: float = 1.0, output_scale: float = 1 / 9, head_std: float | None = None
    ) -> None:
        super().__init__()
        channels = (2 * 3 * PATCH**2, *(int(count * width) for count in (64, 256, 256)))
        # a buffer and not a number, so that one compiled network serves all scales
        self.register_buffer("output_scale", torch.tensor(output_scale), persistent=False)
        self.output_scale: Tensor
        self.whitening = nn.Conv2d(3, channels[0], PATCH)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        self.blocks = nn.Sequential(*(Block(*pair) for pair in pairwise(channels)))
        self.head = nn.Linear(channels[-1], classes, bias=False)
        if head_std is not None:
            nn.init.normal_(self.head.weight, std=head_std)

    def forward(self, images: Tensor) -> Tensor:
        # bfloat16 would blur the small differences that whitening amplifies
        with torch.autocast(images.device.type, enabled=False):
            hidden = F.gelu(self.whitening(images))
        features = F.max_pool2d(self.blocks(hidden), 3).flatten(1)
        return self.head(features).float() * self.output_scale  # type: ignore[no-any-return]

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the filters of the first layer to the whitening transform of the images' patches, with both signs.

        The filters are the eigenvectors of the covariance of the patches, divided by the roots of the eigenvalues. So
        the layer's outputs, before its bias, have unit variance, and those of one sign are uncorrelated.

        Args:
            images: normalised training images, float32 (N, 3, H, W).
        """
        patches = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)  # (N, 3, H - 1, W - 1, rows, columns)
        vectors = patches.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2)  # (12, patches), in the order of a filter
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.cov(vectors).cpu())  # tiny: a GPU would take longer
        filters = (eigenvectors / (eigenvalues + WHITENING_EPS).sqrt()).T.reshape(-1, *self.whitening.weight.shape[1:])
        self.whitening.weight.copy_(torch.cat([filters, -filters]))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=BATCH_NORM_WEIGHT)
    norm.weight.requires_grad_(False)
    return norm
