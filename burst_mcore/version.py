"""The version, in a file that the build reads without importing torch."""

__version__ = "0.2.0"
