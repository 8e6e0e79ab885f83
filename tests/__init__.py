"""Tests: ``unit`` needs no engine, ``contract`` is one suite for every driver, ``e2e`` needs the real thing."""
