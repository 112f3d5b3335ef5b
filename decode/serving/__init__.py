"""Other engines that serve drafts.

- running/: engines that run: started, asked and ended

It may import all of decode/ but the commands; the rest of decode/ does not import it.
"""
