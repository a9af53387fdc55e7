"""Tables and figure of the study of step size by depth, from committed records alone."""

from nero_lab.report.depth.figure import draw
from nero_lab.report.depth.study import Study, read_study
from nero_lab.report.depth.tables import fill

__all__ = ["Study", "draw", "fill", "read_study"]
