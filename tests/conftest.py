"""Hypothesis profiles: `ci`, the default, draws the same examples every time; `nightly` searches further.

`pytest --hypothesis-profile nightly` chooses the other one.
"""

from __future__ import annotations

from hypothesis import settings

# No deadline: the first call of a compiled kernel takes seconds, and shared CI machines stall.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("nightly", derandomize=False, deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("ci")
