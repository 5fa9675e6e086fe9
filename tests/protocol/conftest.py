"""Hypothesis times no example here: on a machine that is shared, slow is not wrong."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
