"""Networks as models that read trees."""
