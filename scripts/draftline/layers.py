"""Which target layers are tapped (specs: released DFlash checkpoints' rule)."""

from draftline.errors import DraftlineError


def default_layer_ids(count: int, num_layers: int) -> list[int]:
    """`count` ids from layer 1 to layer L-3 of `num_layers`, evenly spaced, Python's rounding; ``[L // 2]`` for one."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + j * (num_layers - 4) / (count - 1)) for j in range(count)]


def layer_ids(layers: int | list[int], num_layers: int, key: str) -> list[int]:
    """Tapped layer ids from the config's value: a count, or the ids themselves.

    An id is a 0-based decoder layer whose *output* is tapped. The last layer is refused: Hugging Face gives its state after
    the final norm, and serving engines cannot capture it. Raises DraftlineError naming `key`.
    """
    most = max(num_layers - 3, 1)
    if isinstance(layers, int) and layers > most:
        raise DraftlineError(
            f"config: {key}: {layers}: of a target of {num_layers} layers {most} can be tapped, evenly spaced"
        )
    ids = default_layer_ids(layers, num_layers) if isinstance(layers, int) else layers
    if ids != sorted(set(ids)):
        raise DraftlineError(f"config: {key}: {ids}: must be ascending and without repeats")
    if ids[0] < 0 or ids[-1] > num_layers - 2:
        raise DraftlineError(
            f"config: {key}: {ids}: a target of {num_layers} layers can be tapped at 0..{num_layers - 2}"
        )
    return ids
