"""A short text that two plans have in common exactly if ranks can execute them together."""

from __future__ import annotations

import hashlib
import json

from zinf_fx.plan.codec import encode
from zinf_fx.plan.schedule import Plan


def digest(plan: Plan) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(encode(plan)).encode()).hexdigest()[:16]
