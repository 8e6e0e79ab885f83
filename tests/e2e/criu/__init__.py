"""Tests of the criu driver: processes go back with the files."""
