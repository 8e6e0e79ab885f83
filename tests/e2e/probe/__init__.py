"""Tests of probes: hidden checks that look at a live container from outside."""
