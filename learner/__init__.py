"""What trains: buffer, objective, checkpoints, publication. The only package that imports torch."""
