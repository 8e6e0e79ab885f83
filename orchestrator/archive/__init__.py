"""Portable archives of runs: ``pack`` writes them, ``unpack`` reads them and trusts nothing."""
