"""A short text that stands for data."""

from __future__ import annotations

import hashlib
import json


def digest_of(data: object) -> str:
    """16 hexadecimal digits, of anything that JSON can say."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
