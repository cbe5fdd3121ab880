"""What volunteers run: an engine that generates rollouts, within limits the volunteer sets."""
