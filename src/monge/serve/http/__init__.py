"""The application: endpoints, middleware and connections."""
