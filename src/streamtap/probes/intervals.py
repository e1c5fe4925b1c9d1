"""How far a measured accuracy can be trusted."""

from __future__ import annotations

from math import sqrt

from streamtap.errors import InvalidInput

Z_95 = 1.959963984540054


def wilson(correct: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion ``correct / n``, 95 % unless ``z`` says otherwise.

    It stays inside [0, 1] and is honest for few rows and for proportions near 0 or 1, where the
    normal interval collapses. Wilson (1927), "Probable inference, the law of succession, and
    statistical inference", JASA 22.

    Raises:
        InvalidInput: ``n`` is not positive, or ``correct`` lies outside [0, n].
    """
    if n < 1 or not 0 <= correct <= n:
        raise InvalidInput(f"a proportion needs 0 <= correct <= n and n >= 1; got {correct} of {n}.")
    share = correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding would leave 1e-17.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == n else centre + half
    return low, high
