"""Reading of training logs of BVLC Caffe, NVIDIA Caffe and caffepy, and output as tables and charts."""

from caffepy.logs.plot import CHARTS, plot_logs
from caffepy.logs.read import LogRow, TrainingLog, read_log
from caffepy.logs.table import write_tables

__all__ = ["CHARTS", "LogRow", "TrainingLog", "plot_logs", "read_log", "write_tables"]
