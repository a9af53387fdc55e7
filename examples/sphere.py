"""Draw neurons that turn on their sphere while a network learns, and what one step does to one neuron.

A balanced neuron of four weights has zero mean and unit norm, so it lies on a sphere in three dimensions, which a
picture can show. The network has one hidden layer of such neurons. Its inputs are the first four principal components
of scikit-learn's digits, and Nero trains it at ten times the default learning rate, so that single steps are visible.
"""

import argparse
import hashlib
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Polygon
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.nn import functional

import nero
from nero.rule import project, turn

NERO, PALE, GREY, BLACK = "#0072B2", "#56B4E9", "#555555", "#222222"  # the blues are of Okabe and Ito, as in the demo
FIRST_FRAMES = 20
FIRST_MS, FRAME_MS, LAST_MS = 100, 40, 1800
DPI = 120
SHADES = 16
TILT_DEGREES = 30  # the view from above, which opens the angle between the start and the neuron
STEP_RATE = 0.6  # in the picture of one step
SLANT_DEGREES = 45  # of the plane in that picture
BEHIND = 0.35  # the opacity of what is behind the sphere
#: Orthonormal axes of the weights with zero mean, for a fan-in of four and of three.
AXES_OF_FOUR = torch.tensor([[1.0, -1, 0, 0], [1, 1, -2, 0], [1, 1, 1, -3]]) / torch.tensor([[2.0], [6], [12]]).sqrt()
AXES_OF_THREE = torch.tensor([[1.0, -1, 0], [1, 1, -2]]) / torch.tensor([[2.0], [6]]).sqrt()


@dataclass(frozen=True)
class Plan:
    """The size of the network, and the length of training."""

    neurons: int = 12
    batch: int = 128
    steps: int = 120
    rate: float = 0.1
    seed: int = 6  # most of its neurons are on one side of the sphere, where they can be seen
    logits: float = 4.0  # the factor of the outputs, which are small for unit neurons


def train(plan: Plan) -> dict[str, Any]:
    """Train the network; return the hidden neurons and the training loss, at the start and after each step."""
    torch.manual_seed(plan.seed)
    pixels, digits = load_digits(return_X_y=True)
    parts = torch.as_tensor(PCA(4, random_state=0).fit_transform(pixels)).float()
    inputs, labels = (parts - parts.mean(0)) / parts.std(0), torch.as_tensor(digits)
    model = nn.Sequential(nn.Linear(4, plan.neurons), nn.ReLU(), nn.Linear(plan.neurons, 10))
    optimiser = nero.Nero(model, lr=plan.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, plan.steps)
    hidden, losses = [], []

    def keep() -> None:
        with torch.no_grad():
            losses.append(round(functional.cross_entropy(plan.logits * model(inputs), labels).item(), 4))
        hidden.append([[round(weight, 5) for weight in neuron] for neuron in next(model.parameters()).tolist()])

    keep()
    for _ in range(plan.steps):
        batch = torch.randperm(len(labels))[: plan.batch]
        optimiser.zero_grad()
        functional.cross_entropy(plan.logits * model(inputs[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        keep()
    return {"torch": torch.__version__, "plan": asdict(plan), "train_loss": losses, "neurons": hidden}


class Film(NamedTuple):
    """The contents of the frames.

    Attributes:
        points: the neurons as seen, (steps + 1, neurons, 3): right, up, and towards the reader.
        losses: the training loss at the start and after each step.
        turned: the angle of each step in degrees, (steps, neurons).
        from_start: the angle from the start in degrees, (steps + 1, neurons).
        shown: the index of the neuron that turns farthest, which the frames follow.
    """

    points: Tensor
    losses: list[float]
    turned: Tensor
    from_start: Tensor
    shown: int


def make_film(record: dict[str, Any]) -> Film:
    """Project the neurons of a record onto the sphere, and choose a view of the neuron that turns farthest."""
    points = torch.tensor(record["neurons"]) @ AXES_OF_FOUR.T
    from_start = _degrees(points, points[:1])
    shown = int(from_start[-1].argmax())
    first, last = points[0, shown], points[-1, shown]
    ahead = functional.normalize(points.mean((0, 1)) + 0.3 * (first + last), dim=0)  # most neurons are in front
    along = last - first
    along = functional.normalize(along - (along @ ahead) * ahead, dim=0)  # the path runs from left to right
    up, tilt = torch.linalg.cross(ahead, along), math.radians(TILT_DEGREES)
    view = torch.stack(
        [along, up * math.cos(tilt) - ahead * math.sin(tilt), up * math.sin(tilt) + ahead * math.cos(tilt)]
    )
    return Film(points @ view.T, record["train_loss"], _degrees(points[1:], points[:-1]), from_start, shown)


def _degrees(ones: Tensor, others: Tensor) -> Tensor:
    """Measure the angles between unit vectors, precisely also where they are small."""
    return torch.rad2deg(2 * torch.atan2((ones - others).norm(dim=-1), (ones + others).norm(dim=-1)))


def draw_frame(film: Film, step: int) -> Figure:
    """Draw the neurons after a step, with their trails, the loss and the angles of the steps so far."""
    figure = Figure(figsize=(4.8, 3.3), dpi=DPI, facecolor="white")
    _draw_sphere(figure.add_axes((0.0, 0.06, 0.625, 0.86)), film, step)
    steps = len(film.losses) - 1
    loss, angle = figure.add_axes((0.69, 0.60, 0.29, 0.26)), figure.add_axes((0.69, 0.16, 0.29, 0.26))
    loss.plot(range(step + 1), film.losses[: step + 1], color=BLACK, linewidth=1.6)
    loss.plot(step, film.losses[step], color=BLACK, marker="o", markersize=4)
    loss.set_ylim(0, 1.05 * max(film.losses))
    if step:
        angle.plot(range(1, step + 1), film.turned[:step].median(1).values, color=PALE, linewidth=1.6)
        angle.plot(range(1, step + 1), film.turned[:step, film.shown], color=NERO, linewidth=1.2)
        angle.plot(step, film.turned[step - 1, film.shown], color=NERO, marker="o", markersize=4)
    angle.set_ylim(0, 1.05 * float(film.turned[:, film.shown].max()))
    angle.yaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    for axes, title in ((loss, "training loss"), (angle, "angle of each step")):
        axes.set_title(title, fontsize=9, loc="left", pad=4, color=BLACK)
        axes.set_xlim(-0.02 * steps, 1.04 * steps)
        axes.tick_params(labelsize=8, colors=GREY, length=2)
        axes.spines[["top", "right"]].set_visible(False)
    angle.set_xlabel("step", fontsize=8, color=GREY, labelpad=1)
    figure.text(0.02, 0.945, "Neurons turn while the network learns", fontsize=10.5, fontweight="bold", color=BLACK)
    figure.text(0.02, 0.025, "a dot: one neuron; a bead: one step", fontsize=8.5, color=GREY)
    return figure


def _draw_sphere(axes: Axes, film: Film, step: int) -> None:
    axes.set_xlim(-1.09, 1.09)
    axes.set_ylim(-1.04, 1.04)
    axes.set_aspect("equal")
    axes.axis("off")
    outline = Circle((0, 0), 1, facecolor="none", edgecolor="#8d99a6", linewidth=1.2, zorder=1)
    axes.add_patch(outline)
    for ring in range(SHADES):  # the light falls from the upper left
        share = ring / (SHADES - 1)
        grey = [0.85 + 0.1 * share, 0.89 + 0.065 * share, 0.93 + 0.03 * share]
        shade = Circle((-0.28 * share, 0.3 * share), 1.02 - 0.85 * share, facecolor=grey, linewidth=0, zorder=0)
        axes.add_patch(shade)
        shade.set_clip_path(outline)
    for neuron in film.points[step, :, 2].argsort().tolist():  # the nearest last
        _draw_trail(axes, film.points[: step + 1, neuron], is_shown=neuron == film.shown)
    _draw_angle(axes, film, step)


def _draw_trail(axes: Axes, path: Tensor, *, is_shown: bool) -> None:
    """Draw a ring at the start, a bead per step and a dot for the neuron; what is behind the sphere is pale."""
    colour, size, layer = (NERO, 1.3, 6) if is_shown else (PALE, 1.0, 2)
    for point, (marker, face) in ((0, (4.0, "white")), (-1, (6.5, colour))):
        x, y, depth = path[point].tolist()
        axes.plot(
            x, y, marker="o", markersize=size * marker, markerfacecolor=face, zorder=layer - point,
            markeredgecolor="white" if point else colour, markeredgewidth=0.9, alpha=1 if depth >= 0 else BEHIND,
        )  # fmt: skip
    for is_front in (False, True):
        here = path[1:][(path[1:, 2] >= 0) == is_front]
        axes.plot(
            here[:, 0], here[:, 1], linestyle="", marker="o", markersize=2.2 * size, markeredgewidth=0, color=colour,
            alpha=0.9 if is_front else BEHIND, zorder=layer,
        )  # fmt: skip


def _draw_angle(axes: Axes, film: Film, step: int) -> None:
    """Draw the wedge from the centre that the followed neuron has turned through."""
    start, end = film.points[0, film.shown], film.points[step, film.shown]
    arc = torch.stack([functional.normalize(torch.lerp(start, end, share / 24), dim=0) for share in range(25)])
    axes.add_patch(Polygon([(0, 0), *arc[:, :2].tolist()], facecolor=NERO, alpha=0.13, linewidth=0, zorder=4))
    for radius in (start, end):
        axes.plot([0, float(radius[0])], [0, float(radius[1])], color=NERO, linewidth=1.1, zorder=5)
    axes.plot(0, 0, color=NERO, marker="o", markersize=2.5, zorder=5)
    axes.plot(*film.points[: step + 1, film.shown, :2].T, color=NERO, linewidth=0.8, alpha=0.5, zorder=5)
    text = f"{film.from_start[step, film.shown]:.0f}°"
    axes.text(0.02, 0.05, text, fontsize=13, fontweight="bold", color=NERO, ha="center", zorder=9)


def _durations(frames: int) -> list[int]:
    """Return the milliseconds of each frame: the first steps turn farthest and are shown slowly, the last one stays."""
    return [FIRST_MS if frame < FIRST_FRAMES else FRAME_MS for frame in range(frames - 1)] + [LAST_MS]


def write_gif(record_bytes: bytes, path: Path) -> None:
    """Draw an endless GIF from the bytes of a record; its comment is their SHA-256."""
    film = make_film(json.loads(record_bytes))
    frames = []
    for step in range(len(film.losses)):
        png = io.BytesIO()
        draw_frame(film, step).savefig(png, format="png")
        frames.append(Image.open(png).convert("RGB"))
    # one palette for all frames, so that what stands still takes no bytes
    counts: list[tuple[int, Any]] = frames[-1].getcolors(1 << 24) or []
    # without off-whites, which pillow would take for the white of the background
    ordered = [colour for _, colour in sorted(counts, reverse=True) if min(colour) < 246 or min(colour) == 255]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in ordered[:256] for part in colour])
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=_durations(len(images)),
        loop=0, comment=hashlib.sha256(record_bytes).hexdigest().encode(),
    )  # fmt: skip


class Step(NamedTuple):
    """The points of one step of one neuron, in the order in which it passes them.

    Attributes:
        start: the neuron w, balanced.
        gradient: g / ḡ, of unit length at the first step.
        moved: w less η |w| g / ḡ.
        centred: the same less its mean.
        end: the same divided by its norm: the new w, balanced.
    """

    start: Tensor
    gradient: Tensor
    moved: Tensor
    centred: Tensor
    end: Tensor


def take_step(rate: float) -> Step:
    """Take the first step of a neuron of three weights by the rule itself."""
    plane, mean = AXES_OF_THREE, torch.ones(3) / math.sqrt(3)
    outwards, along = (torch.tensor([math.cos(angle), math.sin(angle)]) @ plane for angle in (-2.2, -0.63))
    start = outwards[None]
    gradient = functional.normalize(-0.84 * along - 0.26 * outwards - 0.48 * mean, dim=0)[None]
    moved = start - rate * start.norm() * gradient
    centred = project(moved, (1,), fix_norm=False).tensor
    end = turn(start, gradient, torch.zeros(1, 1), 1, axes=(1,), lr=rate, beta=0.999).parameter
    return Step(*(point[0] for point in (start, gradient, moved, centred, end)))


def draw_step(step: Step, rate: float) -> Figure:
    """Draw a step of a neuron of three weights, whose balanced forms are a circle, and what the arrows are."""
    figure = Figure(figsize=(4.8, 5.5), facecolor="white")
    axes = figure.add_axes((0, 0.37, 1, 0.63))
    axes.set_xlim(-1.17, 0.73)
    axes.set_ylim(-1.12, 0.25)
    axes.set_aspect("equal")
    axes.axis("off")
    ring = [(math.cos(angle), math.sin(angle)) for angle in torch.linspace(0, 2 * math.pi, 181).tolist()]
    circle = _seen(torch.tensor(ring) @ AXES_OF_THREE).tolist()
    corners = torch.tensor([[-3.0, -1.44], [3, -1.44], [3, 3], [-3, 3]])
    axes.add_patch(
        Polygon(_seen(corners @ AXES_OF_THREE).tolist(), facecolor="#f3f5f7", edgecolor="#c9d1d9", linewidth=1)
    )
    axes.add_patch(Polygon(circle, facecolor="#e7eef5", edgecolor=NERO, linewidth=1.8))
    axes.text(-1.12, -0.97, "plane of zero mean", fontsize=10, color=GREY)
    axes.text(0.7, -0.37, "circle of\nunit norm", fontsize=10, color=NERO, ha="right", va="center")
    arc = torch.stack(
        [functional.normalize(torch.lerp(step.start, step.end, share / 24), dim=0) for share in range(25)]
    )
    axes.add_patch(Polygon([(0, 0), *_seen(arc).tolist()], facecolor=NERO, alpha=0.16, linewidth=0))
    start, moved, centred, end = (_seen(point) for point in (step.start, step.moved, step.centred, step.end))
    gradient = _seen(step.start + step.gradient)
    for tail, tip, colour, width in (
        (0 * start, start, PALE, 3.0), (0 * end, end, NERO, 3.6), (start, gradient, GREY, 2.0),
        (start, moved, BLACK, 2.6), (moved, centred, BLACK, 1.4), (centred, end, BLACK, 1.4),
    ):  # fmt: skip
        _draw_arrow(axes, tail, tip, colour, width)
    badges = (
        (start + gradient, (0, 0.085)),
        (start + moved, (0, 0.075)),
        (moved + centred, (-0.08, 0)),
        (centred + end, (0.08, -0.03)),
    )
    for number, (ends, (right, up)) in enumerate(badges, start=1):
        _draw_badge(axes, float(ends[0]) / 2 + right, float(ends[1]) / 2 + up, number)
    degrees = float(_degrees(step.start, step.end))
    for x, y, text, colour in (
        (-0.36, -0.29, "w", PALE), (-0.09, -0.45, "new w", NERO), (-0.03, 0.05, f"{degrees:.0f}°", NERO)
    ):  # fmt: skip
        axes.text(x, y, text, color=colour, fontsize=13, fontweight="bold", ha="right" if text == "w" else "left")
    _draw_words(figure, rate, degrees)
    return figure


def _draw_words(figure: Figure, rate: float, degrees: float) -> None:
    words = figure.add_axes((0, 0, 1, 0.37))
    words.set_xlim(0, 4.8)
    words.set_ylim(0, 5.5 * 0.37)
    words.axis("off")
    lines = (
        "The gradient, divided by its running average length:\nits direction counts, its size hardly does.",
        "The step against it, about η times as long as w.",
        "Subtract the mean: back down to the plane.",
        "Divide by the norm: back to the circle.",
    )
    y = 1.93
    for number, line in enumerate(lines, start=1):
        _draw_badge(words, 0.24, y, number)
        words.text(0.45, y + 0.065, line, fontsize=10, color=BLACK, va="top", linespacing=1.25)
        y -= 0.45 if "\n" in line else 0.285
    words.text(
        0.12, 0.54, "The learning rate η sets the angle of the turn.", fontsize=11, fontweight="bold", color=NERO
    )
    note = (
        f"Here η is {rate:g}, or {math.degrees(rate):.0f}°. The neuron turns through {degrees:.0f}°, since\n"
        "only a step along the circle turns it. The default η is 0.01."
    )
    words.text(0.12, 0.13, note, fontsize=9, color=GREY, linespacing=1.3)


def _draw_badge(axes: Axes, x: float, y: float, number: int) -> None:
    box = {"boxstyle": "circle,pad=0.22", "facecolor": BLACK, "edgecolor": "white", "linewidth": 1}
    axes.text(x, y, str(number), color="white", fontsize=9, fontweight="bold", ha="center", va="center", bbox=box)


def write_step(path: Path) -> None:
    """Draw the picture of one step as an SVG on white, with its letters as outlines, so that no font is needed."""
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "nero"}):
        figure = draw_step(take_step(STEP_RATE), STEP_RATE)
        metadata = {"Date": None, "Creator": None, "Title": "One step of Nero"}
        figure.savefig(path, format="svg", facecolor="white", metadata=metadata)


def _seen(points: Tensor) -> Tensor:
    """Project points of three weights onto the paper, with the plane of zero mean seen from above at a slant."""
    flat = points @ AXES_OF_THREE.T
    height = points.sum(-1) / math.sqrt(3)
    slant = math.radians(SLANT_DEGREES)
    return torch.stack([flat[..., 0], math.sin(slant) * flat[..., 1] + math.cos(slant) * height], -1)


def _draw_arrow(axes: Axes, tail: Tensor, tip: Tensor, colour: str, width: float) -> None:
    ends = [tuple(end.tolist()) for end in (tail, tip)]
    head = f"-|>,head_length={3 + 1.2 * width},head_width={1.5 + 0.7 * width}"
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle=head, color=colour, lw=width, shrinkA=0, shrinkB=0))


def main(argv: list[str] | None = None) -> int:
    """Train, draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures and the record")
    parser.add_argument("--steps", type=int, default=Plan.steps, help=f"steps of training (default: {Plan.steps})")
    parser.add_argument("--draw", action="store_true", help="draw the record in --out again, without training")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "sphere.json"
    if not options.draw:
        torch.set_num_threads(1)  # the matrices are too small for threads to help
        path.write_text(json.dumps(train(Plan(steps=options.steps)), separators=(",", ":")) + "\n")
    write_gif(path.read_bytes(), path.with_suffix(".gif"))
    write_step(options.out / "constraint.svg")
    film = make_film(json.loads(path.read_bytes()))
    ends = film.from_start[-1]
    print(f"training loss {film.losses[0]:.2f} to {film.losses[-1]:.2f} in {len(film.losses) - 1} steps")
    print(f"neurons end {ends.min():.0f} to {ends.max():.0f} degrees from their start; pictures: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
