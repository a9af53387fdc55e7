"""VGG-11 for 32 x 32 images, without batch norm."""

from torch import nn

from nero.paper.models.dropout import Dropout

#: Channels of each convolution; "pool" halves the image.
LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(classes: int = 10, *, width: float = 1.0, dropout: float = 0.5) -> nn.Sequential:
    """Eight convolutions without bias (Kaiming normal, fan-out), then three linear layers with dropout between.

    Args:
        classes: how many outputs.
        width: of every layer, relative to the paper's.
        dropout: the probability to drop a unit.
    """
    features: list[nn.Module] = []
    before = 3
    for layer in LAYERS:
        if isinstance(layer, str):
            features.append(nn.MaxPool2d(2))
            continue
        channels = int(layer * width)
        convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        features += [convolution, nn.ReLU(inplace=True)]
        before = channels
    hidden = int(4096 * width)
    return nn.Sequential(
        *features,
        nn.Flatten(),
        nn.Linear(before, hidden),
        nn.ReLU(inplace=True),
        Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        Dropout(dropout),
        nn.Linear(hidden, classes),
    )
