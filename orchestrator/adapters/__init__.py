"""The frameworks whose agents are recorded, one module each. None of them is imported before it is asked for."""
