"""The pictures of the documents, taken in a real Chromium: `make pictures`."""
