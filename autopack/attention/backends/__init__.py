"""One module for each backend of one call for all documents."""
