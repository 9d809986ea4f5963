"""What clients send and what they are sent: bodies, requests of the engine, calls, answers, errors."""
