"""What is learned: prompts, rewards, and the scorer process that runs every reward."""
