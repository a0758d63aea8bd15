"""Is it any good: likelihood and generation tasks, period accuracy, checkpoint tests, pairs for people; results as files."""
