"""Raw files to clean documents: `lamp data clean`.

In:  paths of text, JSON lines, tables, HTML, TEI and ALTO files, packed or not.
Out: JSON lines that `lamp train` reads as they are, and a log in which every document that was left out has its reason.

documents (which files, what is in them), decode -> html, tei, alto -> normalise (characters) -> gutenberg (what is not the
book) -> normalise (joined lines) -> quality (measures, language) -> dedup -> worker (parts) and job (shards, log, table).
"""
