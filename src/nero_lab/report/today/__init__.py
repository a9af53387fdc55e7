"""Tables and figures of the study of today's optimisers, from committed records alone."""

from nero_lab.report.today.study import Study, read_study
from nero_lab.report.today.tables import fill

__all__ = ["Study", "fill", "read_study"]
