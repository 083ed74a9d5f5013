"""How long a block lives and how deep it may go: terms, token ranges, named pins, the time to trust."""
