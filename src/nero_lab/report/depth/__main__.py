"""``python -m nero_lab.report.depth``: fill the study's tables and draw its figure, at the root of the repository."""

from pathlib import Path

from nero_lab.report.depth.figure import draw
from nero_lab.report.depth.study import read_study
from nero_lab.report.depth.tables import fill
from nero_lab.report.figures import save
from nero_lab.store import write_bytes

PAGES = ("docs/guide/auto.md", "docs/studies/depth.md")


def main(root: Path = Path()) -> None:
    """Bring the pages and the figure under the root up to date with the records there."""
    study = read_study(root)
    for name in PAGES:
        write_bytes(root / name, fill((root / name).read_text(), study).encode())
    save(draw(study), root / "docs/figures/auto.png")


if __name__ == "__main__":
    main()
