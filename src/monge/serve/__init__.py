"""Serving: many clients share the components of a decoder."""

from monge.core.extras import require as _require

_require("serve", "a server")
