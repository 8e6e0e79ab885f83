"""Runs agents in containers and takes conversation and container back together."""

__version__ = "0.1.0"
