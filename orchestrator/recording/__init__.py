"""Agents with a loop of their own: recorded, taken back by running them again, answered from the log until there."""
