"""One module for each protocol: from its JSON to a request, from a reply to its JSON and events."""
