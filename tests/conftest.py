"""Settings of every test run."""

import os

from hypothesis import settings

# Time never decides a test. CI draws the same examples every time; a developer's run explores.
settings.register_profile("forest", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("forest")
