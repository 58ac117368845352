"""The DFlash drafter: model, training, export."""
