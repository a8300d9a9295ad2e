"""What differs between two configs."""

from t2g.config import Section
from t2g.config.loading import flat


def differing(a: Section, b: Section) -> set[str]:
    """Dotted keys that differ, those that only one of the two has included."""
    left, right, absent = flat(a.model_dump()), flat(b.model_dump()), object()
    return {key for key in left.keys() | right.keys() if left.get(key, absent) != right.get(key, absent)}
