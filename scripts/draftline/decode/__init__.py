"""Drafting and verifying: the chain, the tree, replay over stored completions, live decoding with the target."""
