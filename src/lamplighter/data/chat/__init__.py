"""Instruction rows: from rows to examples to packed windows."""
