"""The store as a whole: which snapshots of which runs stay, and whether everything is as it was written."""
