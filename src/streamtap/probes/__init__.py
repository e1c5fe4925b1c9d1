"""Learn from rows: estimators, splits that do not leak, scores with intervals, baselines and controls."""
