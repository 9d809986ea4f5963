"""The laboratory: measurements for those who develop `monge`. It imports the package, which never imports it."""
