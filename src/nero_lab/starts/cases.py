"""The cases of the study: small networks whose parameters start at zero or near it, and their data."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab.data import ImageDataset, load
from nero_lab.data.dataset import DataError
from nero_lab.data.folder import Folder
from nero_lab.data.sources import MULTI30K, WIKITEXT2
from nero_lab.models.resnet import Block, resnet18

#: Loss of a model on a batch.
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
WIDTH, HEADS, LAYERS, CONTEXT = 192, 4, 6, 128


@dataclass(frozen=True)
class Case:
    """A network, its loss, and batches of training and validation data.

    Args:
        title: what starts at zero, in words.
        data: the data set: "images", "english" or "german".
        model: makes the network from a trained base, if the case has one.
        loss: the loss of a batch of inputs and labels.
        base: the case whose trained network this one starts from.
    """

    title: str
    data: str
    model: Callable[[nn.Module | None], nn.Module]
    loss: Loss
    base: str = ""
    batch: int = 128


@lru_cache
def images(folder: Path, device: torch.device, part: str) -> tuple[Tensor, Tensor]:
    """Return CIFAR-10's images, between -1 and 1, and labels."""
    data = load("cifar10", folder)
    assert isinstance(data, ImageDataset)
    chosen = getattr(data, part)
    return (chosen.pixels.to(device).float() / 127.5 - 1), chosen.labels.to(device)


@lru_cache
def text(folder: Path, device: torch.device, language: str, part: str) -> Tensor:
    """Return the bytes of WikiText-2, or of Multi30k's German sentences."""
    is_train = part == "train"
    if language == "english":
        source, name = Folder("wikitext2", folder, None), WIKITEXT2[0 if is_train else 1]
    else:
        source, name = Folder("multi30k", folder, None), MULTI30K[0 if is_train else 1][0]
    path = source.find(name)
    if path is None:
        raise DataError(f"{name} is not in {folder}: name a folder that has it by --data")
    return torch.frombuffer(bytearray(source.read(path)), dtype=torch.uint8).to(device)


def batches(case: Case, folder: Path, device: torch.device, part: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of a part, without end."""
    generator = torch.Generator().manual_seed(seed)
    if case.data == "images":
        pixels, labels = images(folder, device, part)
        while True:
            rows = torch.randint(len(labels), (case.batch,), generator=generator).to(device)
            yield pixels[rows], labels[rows]
    stream = text(folder, device, case.data, part)
    offsets = torch.arange(CONTEXT + 1, device=device)
    while True:
        starts = torch.randint(len(stream) - CONTEXT - 1, (case.batch // 2,), generator=generator).to(device)
        rows = stream[starts[:, None] + offsets].long()
        yield rows[:, :-1], rows[:, 1:]


def classify(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of a classifier or language model, of this package or of transformers."""
    outputs = model(inputs)
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def denoise(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the error of a network that removes noise, by the difference of clean image and noise."""
    # the noise depends on the batch alone, so that all contenders see the same
    generator = torch.Generator(inputs.device).manual_seed(int(labels.sum()))
    noise = torch.randn(inputs.shape, generator=generator, device=inputs.device)
    time = torch.rand(len(inputs), 1, 1, 1, generator=generator, device=inputs.device)
    noisy = time * inputs + (1 - time) * noise
    return F.mse_loss(model(noisy, time.flatten(), labels, inputs), inputs - noise)


def convnext(_: nn.Module | None) -> nn.Module:
    """Build a small ConvNeXt."""
    transformers: Any = import_module("transformers")
    sizes = {"hidden_sizes": [48, 96, 192], "depths": [2, 2, 6], "num_stages": 3}
    model: nn.Module = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(patch_size=2, image_size=32, num_labels=10, **sizes)
    )
    return model


def vision_transformer(_: nn.Module | None, layer_scale: float = 1e-5, zero_head: bool = False) -> nn.Module:
    """Build a small transformer of DINOv2's form."""
    transformers: Any = import_module("transformers")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    config = transformers.Dinov2Config(
        image_size=32, patch_size=4, num_labels=10, layerscale_value=layer_scale, **sizes
    )
    model: nn.Module = transformers.Dinov2ForImageClassification(config)
    if zero_head:
        nn.init.zeros_(cast(Any, model).classifier.weight)
    return model


def residual_network(_: nn.Module | None) -> nn.Module:
    """Build a narrow ResNet-18 whose blocks start as the identity."""
    model = resnet18(width=0.5)
    for block in model.modules():
        if isinstance(block, Block):
            nn.init.zeros_(cast(Tensor, block.body[-1].weight))
    return model


def gemma(_: nn.Module | None) -> nn.Module:
    """Build a small Gemma."""
    transformers: Any = import_module("transformers")
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    model: nn.Module = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **heads, **sizes)
    )
    return model


def llama(_: nn.Module | None, zero: tuple[str, ...] = ()) -> nn.Module:
    """Build a small Llama; parameters with these parts in their names start at zero."""
    transformers: Any = import_module("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(
        vocab_size=256, max_position_embeddings=CONTEXT, num_attention_heads=HEADS, **sizes
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in zero):
            nn.init.zeros_(parameter)
    return model


class LowRank(nn.Module):
    """A frozen linear layer with LoRA's adapter: B A x is added, times two; B starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.linear(inputs) + 2 * self.lora_B(self.lora_A(inputs)))


def low_rank(base: nn.Module | None) -> nn.Module:
    """Freeze a base, and add adapters to its queries and values."""
    assert base is not None
    base.requires_grad_(False)
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj"):
                setattr(module, name, LowRank(cast(nn.Linear, child)))
    return base


class Modulated(nn.Module):
    """A transformer block whose two branches are shifted, scaled and gated by a condition: adaLN-zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        seen = self.first(tokens) * (1 + scale) + shift
        tokens = tokens + gate * self.attention(seen, seen, seen, need_weights=False)[0]
        seen = self.second(tokens) * (1 + scale2) + shift2
        return cast(Tensor, tokens + gate2 * self.mlp(seen))


class Diffusion(nn.Module):
    """A small diffusion transformer for 32 x 32 images, with a zero last layer."""

    def __init__(self, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch**2, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, (32 // patch) ** 2, WIDTH) * 0.02)
        self.label, self.time = nn.Embedding(10, WIDTH), nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Modulated(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * patch**2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, noisy: Tensor, time: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        tokens = F.unfold(noisy, self.patch, stride=self.patch).transpose(1, 2)
        tokens = self.embed(tokens) + self.positions
        condition = F.silu(self.label(labels) + self.time(_waves(time)))
        for block in self.blocks:
            tokens = block(tokens, condition)
        patches = self.head(self.norm(tokens)).transpose(1, 2)
        return F.fold(patches, noisy.shape[2:], self.patch, stride=self.patch)


def _waves(time: Tensor) -> Tensor:
    angles = time[:, None] * torch.logspace(0, 2.5, 32, device=time.device)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Denoiser(nn.Module):
    """A small convolutional network that removes noise: four residual blocks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.time = nn.Conv2d(3, width, 3, padding=1), nn.Linear(64, width)
        self.blocks = nn.ModuleList(_residual(width) for _ in range(4))
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, _: Tensor, __: Tensor, control: tuple[Tensor, ...] = ()) -> Tensor:
        hidden = self.stem(noisy) + self.time(_waves(time))[:, :, None, None]
        for number, block in enumerate(self.blocks):
            hidden = hidden + block(hidden)
            if control:
                hidden = hidden + control[number]
        return cast(Tensor, self.head(hidden))


def _residual(width: int) -> nn.Sequential:
    convolutions = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
    first, second = convolutions
    return nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), first, nn.GroupNorm(8, width), nn.SiLU(), second)


class Controlled(nn.Module):
    """A frozen denoiser, and a copy of it that reads a grey image and acts through convolutions that start at zero."""

    def __init__(self, base: Denoiser) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.copy = deepcopy(base).requires_grad_(True)
        self.copy.head.requires_grad_(False)
        width = base.stem.out_channels
        self.hint = nn.Conv2d(1, width, 3, padding=1)
        self.zero = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in base.blocks)
        for layer in (self.hint, *self.zero):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, noisy: Tensor, time: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        hidden = self.copy.stem(noisy) + self.copy.time(_waves(time))[:, :, None, None]
        hidden = hidden + self.hint(images.mean(1, keepdim=True))
        control = []
        for block, zero in zip(self.copy.blocks, self.zero, strict=True):
            hidden = hidden + block(hidden)
            control.append(zero(hidden))
        return cast(Tensor, self.base(noisy, time, labels, images, tuple(control)))


def controlled(base: nn.Module | None) -> nn.Module:
    """Add a control branch to a base."""
    assert isinstance(base, Denoiser)
    return Controlled(base)


CASES: dict[str, Case] = {
    "convnext": Case("ConvNeXt, LayerScale 1e-6", "images", convnext, classify),
    "layer-scale": Case("DINOv2's transformer, LayerScale 1e-5", "images", vision_transformer, classify),
    "zero-gain": Case("ResNet-18, last gain of each block zero", "images", residual_network, classify),
    "gemma": Case("Gemma, gains 1 + w, w zero", "english", gemma, classify),
    "zero-head": Case(
        "DINOv2's transformer, head zero", "images", lambda _: vision_transformer(_, 1.0, zero_head=True), classify
    ),
    "zero-projection": Case(
        "Llama, last matrix of each branch zero", "english", lambda _: llama(_, ("o_proj", "down_proj")), classify
    ),
    "lora": Case("LoRA on a pretrained Llama, B zero", "german", low_rank, classify, base="llama"),
    "control": Case("ControlNet on a pretrained denoiser", "images", controlled, denoise, base="denoiser"),
    "adaln": Case("diffusion transformer, adaLN-zero", "images", lambda _: Diffusion(), denoise),
    "llama": Case("the base of LoRA", "english", llama, classify),
    "denoiser": Case("the base of ControlNet", "images", lambda _: Denoiser(), denoise),
}
