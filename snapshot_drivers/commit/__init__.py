"""The ``commit`` driver: an image per snapshot, by the engine itself (``docker commit`` and a new container)."""
