"""HTML of reports: the pieces that notebooks show, and the pages that commands make of them."""
