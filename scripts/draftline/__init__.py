"""Draftline: from prompts and a target LLM to a trained, evaluated DFlash drafter, one file at a time."""

__version__ = "0.1.0"
