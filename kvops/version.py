"""The version. It has its own module so that the build can read it without importing kvops."""

__version__ = "0.1.0"
