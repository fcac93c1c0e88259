"""Undertow: language models that carry a state from window to window, so that text of any length costs constant memory."""
