"""What a request asks for: text, chat formats, grammars, processors, penalties and log-probabilities."""
