"""VGG-11 for 32 x 32 images, without batch norm."""

from torch import nn

from nero_lab.models.dropout import Dropout

#: Channels of each convolution, and whether max pooling follows.
LAYERS = (
    (64, True),
    (128, True),
    (256, False),
    (256, True),
    (512, False),
    (512, True),
    (512, False),
    (512, True),
)


def vgg11(classes: int = 10, *, width: float = 1.0, dropout: float = 0.5) -> nn.Sequential:
    """Build eight convolutions without bias (Kaiming normal, fan-out) and three linear layers with dropout.

    Args:
        classes: number of classes.
        width: width of every layer, relative to the paper's.
        dropout: probability to drop a unit.
    """
    features: list[nn.Module] = []
    before = 3
    for layer, is_pooled in LAYERS:
        channels = int(layer * width)
        convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        # ReLU commutes with max pooling, and after it has a quarter of the work
        features += [convolution, *([nn.MaxPool2d(2)] if is_pooled else []), nn.ReLU(inplace=True)]
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
