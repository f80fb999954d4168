"""Readable results: tables and pictures of windows and plans, as rich renderables."""

from routepack.report.inspection import inspect_window
from routepack.report.summary import plan_summary
from routepack.report.terminal import Outcome, methods_table, rank_picture

__all__ = ["Outcome", "inspect_window", "methods_table", "plan_summary", "rank_picture"]
