"""A short text that two plans have in common exactly if ranks can execute them together."""

from __future__ import annotations

import hashlib
import json

from zinf_fx.plan.codec import encode
from zinf_fx.plan.plan import Plan


def digest(plan: Plan) -> str:
    """16 hexadecimal digits."""
    return digest_of(encode(plan))


def digest_of(data: object) -> str:
    """The same of anything that JSON can say."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
