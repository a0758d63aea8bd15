"""The web page over run folders: `lamp dash`, and report.html of one run. Reads what the rooms below have written; no torch."""
