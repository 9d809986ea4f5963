"""Serving: requests of many clients over one set of parts."""

from monge.core.extras import require as _require

_require("serve", "a server")
