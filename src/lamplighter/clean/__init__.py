"""Raw files to clean documents: `lamp data clean`.

In:  paths of text, JSON lines, tables, HTML, TEI and ALTO files, packed or not.
Out: JSON lines that `lamp train` reads as they are, and a log in which every document that was left out has its reason.

raw_documents (which files, what is in them) -> markup (HTML, TEI, ALTO) -> normalise (characters) -> gutenberg (what is not the
book, by the words of boilerplate) -> normalise (joined lines) -> quality (measures, language) -> dedup. worker makes parts of them,
pipeline the shards, the log and the table.
"""
