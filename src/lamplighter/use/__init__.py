"""The model meets people."""
