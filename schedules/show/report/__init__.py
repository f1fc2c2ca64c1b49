"""A report of what was measured: one page that needs nothing else, its plots as PNG, its tables as CSV and JSON.

journals, results files, bundles -> `data`, `importance`, `roofline`, `kernels` -> `plots` -> `page`, `tables` -> files
"""

from schedules.show.report.make import Report, make_report
from schedules.show.report.write import write_report

__all__ = ["Report", "make_report", "write_report"]
