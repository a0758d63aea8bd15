"""Red flags: what a watchful person would see in the curves of a run, seen while it runs.

`memory` keeps what was measured, `learning`, `validation` and `speed` are the rules (pure), `board` says each flag once.
"""
