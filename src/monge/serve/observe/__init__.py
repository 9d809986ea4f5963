"""What operators see: metrics and the log."""
