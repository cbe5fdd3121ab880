"""`python -m echo2.learner`, which torchrun needs: the same as the command `echo2-learner`."""

from .main import main

main()
