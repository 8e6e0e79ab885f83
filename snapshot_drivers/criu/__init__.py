"""The driver that takes processes along with the files."""
