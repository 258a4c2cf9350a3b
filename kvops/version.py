"""The version, in one place (read by the build without importing kvops)."""

__version__ = "0.1.0"
