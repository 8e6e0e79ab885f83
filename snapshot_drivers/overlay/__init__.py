"""The overlay driver: the writable layer, volumes and memory file systems of a container, as a delta."""
