"""The ``git`` driver: the workspace alone, in a bare repository outside of the container (AgentRewind's method)."""
