"""Reads the logs of trainings, of BVLC's Caffe, NVIDIA's and ours, and writes them as tables and charts.

cli imports it.
"""

from caffepy.logs.plot import CHARTS, plot_logs
from caffepy.logs.read import Row, TrainingLog, read_log
from caffepy.logs.table import write_tables

__all__ = ["CHARTS", "Row", "TrainingLog", "plot_logs", "read_log", "write_tables"]
