"""The order in which a drafter meets the parts of hidden states, and how segments cut it."""


def segment_visits(shards: int, parts: int, epochs: int, segments: int, segment: int) -> list[tuple[int, str, str]]:
    """(epoch, shard, part) visits of segment 1..`segments`: all parts in sequence, epoch after epoch, cut evenly."""
    total = epochs * shards * parts
    first, last = (total * n // segments for n in (segment - 1, segment))
    return [
        (visit // (shards * parts), f"{visit // parts % shards:04d}", f"{visit % parts:04d}")
        for visit in range(first, last)
    ]
