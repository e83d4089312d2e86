"""A module that takes long to import."""

from __future__ import annotations

import time

time.sleep(30)
