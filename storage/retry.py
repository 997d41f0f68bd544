"""How often and how patiently a read that the operating system refused is tried again."""

from __future__ import annotations

import errno

RETRIES = 3
"""Attempts after the first, as long as none makes progress, before a read has failed."""

BACK_OFF = 0.01
"""Seconds before the first retry; each further one waits twice as long."""

TRANSIENT = (errno.EIO, errno.EINTR, errno.EAGAIN)
"""Errors that may be gone the next time."""
