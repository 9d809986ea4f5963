"""Audits of servers: does this engine sample from the distribution of its target model?"""
