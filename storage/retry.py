"""Retries of reads that the operating system refuses: their number, their delays and their errors."""

from __future__ import annotations

import errno

RETRIES = 3
"""Consecutive attempts without progress, after the first, before a read fails."""

BACK_OFF = 0.01
"""Seconds before the first retry; every further delay is twice as long."""

TRANSIENT = (errno.EIO, errno.EINTR, errno.EAGAIN)
"""Error numbers of reads that are retried."""
