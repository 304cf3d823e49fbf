"""Process groups: opened early and together, warmed up under a deadline, closed in order, aborted after a failure."""
