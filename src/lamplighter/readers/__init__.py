"""Bytes become records, each with its place: local and remote files, compression, lines, tables, text, bad records."""
