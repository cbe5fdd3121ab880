"""ECHO-2: a central learner, volunteers' GPUs for the rollouts, bounded staleness between them."""
