"""Red flags: what a watchful person would see in the curves of a run, seen while it runs.

`history` keeps what was measured, `learning` and `throughput` are the rules (pure functions), `detector` says each flag once.
"""
