"""Capture and restore of container state; knows containers and bytes, nothing of agents or models."""
