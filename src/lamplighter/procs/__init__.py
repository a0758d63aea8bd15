"""Processes, from outside: /proc, stacks, pools, control groups. No torch; every room may import it."""
