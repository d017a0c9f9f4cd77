"""Measurements of the package on this machine; each module prints a table and can write JSON."""
