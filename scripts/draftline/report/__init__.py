"""The report: one self-contained page over everything that a run made."""
