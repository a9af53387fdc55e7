"""``python -m nero_lab.report.today``: fill the study's tables and draw its figures, at the root of the repository."""

from pathlib import Path

from nero_lab.report.figures import save
from nero_lab.report.today.figures import FIGURES
from nero_lab.report.today.study import read_study
from nero_lab.report.today.tables import fill
from nero_lab.store import write_bytes

FOLDER = "docs/today"
PAGES = tuple(f"{FOLDER}/{name}.md" for name in ("README", "gpt", "vit", "airbench"))


def main(root: Path = Path()) -> None:
    """Bring the pages and the figures under the root up to date with the records there."""
    study = read_study(root)
    for name in PAGES:
        write_bytes(root / name, fill((root / name).read_text(), study).encode())
    for name, drawing in FIGURES.items():
        if drawing.has_runs(study):
            save(drawing.draw(study), root / FOLDER / f"figures/{name}.png")


if __name__ == "__main__":
    main()
