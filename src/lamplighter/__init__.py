"""Lamplighter: language-model training that never goes dark."""

__version__ = "0.1.0"
