"""Raw files to clean documents: `lamp data clean`. The rooms are in the order in which a text passes through them.

In:  paths of text, JSON lines, HTML, TEI and ALTO files, packed or not.
Out: JSON lines that `lamp train` reads as they are, and a log in which every document that was left out has its reason.

documents (which files, what is in them, decode) -> html, tei, alto -> normalise (characters, joined lines) -> gutenberg (what is not the
book) -> lines (joining) -> quality, language (the gate) -> duplicates -> job (files, parts, shards) -> table.
"""
