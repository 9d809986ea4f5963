"""Audits of servers: does this engine sample from the distribution of its target model?"""

from monge.audit.gate import UnclearError, assert_lossless

__all__ = ["UnclearError", "assert_lossless"]
